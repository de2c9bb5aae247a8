"""thinwire: gradient compression for data-parallel PyTorch training on slow networks.

Start with `attach` (DDP), `DistributedOptimizer` (without DDP) or `simulate` (many workers in one process), and a method.
Parts of methods are in `select`, `memory`, `wire` and `exchange`. All names are listed in `thinwire/public.py`; torch is
imported with the first of them, so that the command line can answer without it.
"""

from typing import TYPE_CHECKING, Any

from thinwire.version import __version__ as __version__

if TYPE_CHECKING:
    from thinwire.public import *  # noqa: F403
    from thinwire.public import __all__ as __all__


def __getattr__(name: str) -> Any:
    if name == "__all__" or not name.startswith("_"):
        from importlib import import_module

        public = import_module("thinwire.public")
        if name == "__all__" or name in getattr(public, "__all__", ()):
            found = globals()[name] = getattr(public, name)
            return found
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
