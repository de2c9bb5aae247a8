"""Methods by name: what files and the command line call them, and how one is built from plain values."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from thinwire.errors import UsageError
from thinwire.tools.settings.building import Plain, build, find_public
from thinwire.tools.settings.fields import describe
from thinwire.tools.settings.names import check_name, hint, import_own
from thinwire.tools.settings.sections import compose
from thinwire.validate import check_instance

if TYPE_CHECKING:
    from thinwire.methods import Method


class Preset:
    """A method class and the settings that its name stands for.

    `kind` is the class or its public name: to list the names takes no torch. `lr_scale` is what a recipe multiplies its
    learning rate with, for updates that are not of a gradient's size.
    """

    def __init__(self, kind: str | type[Method], *, lr_scale: float = 1.0, **fixed: Any) -> None:
        self._kind = kind
        self.lr_scale = lr_scale
        self.fixed = fixed

    @property
    def kind(self) -> type[Method]:
        return find_public(self._kind) if isinstance(self._kind, str) else self._kind

    @property
    def settings(self) -> list[str]:
        """What can be set."""
        return list(describe(self.kind))

    def takes(self, setting: str) -> bool:
        return setting in self.settings

    def build(self, given: Plain, where: str) -> Method:
        return build(self.kind, compose([self.fixed, given]), where=where)


class OwnMethod(Preset):
    """The user's own: a method, whose settings can be changed, or a function that makes one from its arguments."""

    def __init__(self, name: str) -> None:
        from thinwire.methods import Method

        found = import_own("method", name)
        if not isinstance(found, Method) and (isinstance(found, type) or not callable(found)):
            module, _, attribute = name.partition(":")
            raise UsageError(
                f"method is {name!r}, but {attribute} of {module} is neither a Method nor a function that makes one"
            )
        super().__init__(type(found) if isinstance(found, Method) else Method)
        self._found: Any = found

    @property
    def _makes(self) -> bool:
        """Whether it is a function."""
        return self._kind is not type(self._found)

    @property
    def settings(self) -> list[str]:
        return list(inspect.signature(self._found).parameters) if self._makes else super().settings

    def build(self, given: Plain, where: str) -> Method:
        if not self._makes:
            return build(self.kind, given, where=where, base=self._found)
        try:
            inspect.signature(self._found).bind(**given)
        except TypeError as error:
            raise UsageError(f"method is {where!r}, which cannot be called: {error}") from None
        made = self._found(**given)
        check_instance(where, made, self.kind, "a function that returns a Method")
        return made


METHODS: dict[str, Preset] = {
    "dense": Preset("Dense"),
    "topk": Preset("TopK"),
    "adtopk": Preset("ADTopK"),
    "adtopk-interleave": Preset("ADTopK", interleave=2),
    "adtopk-threshold": Preset("ADTopK", interleave=2, threshold=True),
    "dgc": Preset("DGC"),
    "gaussiank": Preset("GaussianK"),
    "redsync": Preset("RedSync"),
    "redsync-trimmed": Preset("RedSync", trimmed=True),
    "sidco": Preset("SIDCo"),
    "randomk": Preset("RandomK"),
    "threshold": Preset("Threshold", threshold=0.002),
    "chunktopk": Preset("ChunkTopK", chunk=16),
    # A vote is +1 or -1, hundreds of times a gradient.
    "signsgd": Preset("SignSGD", lr_scale=0.002),
    "efsignsgd": Preset("SignSGD", memory={"kind": "Residual"}),
    "oktopk": Preset("OkTopK"),
    "oktopk-published": Preset("OkTopK", thresholds="published"),
    "exclusive": Preset("ExclusiveTopK"),
    "gtopk": Preset("GTopK"),
    "gtopk-conserve": Preset("GTopK", conserve=True),
    "topkdsa": Preset("TopKDSA"),
    "topka": Preset("TopKA"),
    "powersgd": Preset("PowerSGD"),
    "acpsgd": Preset("ACPSGD"),
    "quantized": Preset("Quantized"),
    "quantized-4bit": Preset("Quantized", bits=4),
    "quantized-2bit": Preset("Quantized", bits=2),
    "quantized-1bit": Preset("Quantized", bits=1),
}
"""One line per name, in the order in which they are listed to the user."""


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """What is an option of its own for the methods that have it; --set and files set the rest."""

    name: Annotated[str | None, "--method"] = None
    """One of {METHODS}, or your own as module:attribute."""
    density: Annotated[float | None, "FRACTION"] = None
    """Fraction of the entries sent; 0.01 is 1 %."""
    values: Annotated[str | None, "CODE"] = None
    """Value code on the wire, such as bf16."""
    axis: Annotated[int | str | None, "AXIS"] = None
    """Of adtopk: auto, published or a number."""
    rank: int | None = None
    """Of powersgd and acpsgd."""


def find_preset(name: Any) -> Preset:
    """The method of that name, or the user's own as 'module:attribute'."""
    check_instance("method", name, str, f"one of {', '.join(METHODS)}")
    if ":" in name:
        return OwnMethod(name)
    check_name("method", name, METHODS, " or your own as module:attribute")
    return METHODS[name]


def expand_all(names: Sequence[str]) -> list[str]:
    """Method names as the user listed them; "all" is every one."""
    return list(METHODS) if list(names) == ["all"] else list(names)


def build_method(name: str, settings: Plain | None = None) -> Method:
    """The method of that name with these settings, all of which it must have."""
    given = dict(settings or {})
    check_settings([name], given)
    return find_preset(name).build(given, name)


def keep_taken(name: str, **settings: Any) -> dict[str, Any]:
    """Of some settings those that the method has; None counts as not said."""
    preset = find_preset(name)
    return {k: v for k, v in settings.items() if v is not None and preset.takes(k)}


def check_methods(names: Sequence[str]) -> None:
    """Refuse names that are wrong or come twice."""
    if not names:
        raise UsageError(f"methods is empty; name at least one of {', '.join(METHODS)}")
    for name in names:
        find_preset(name)
    twice = next((name for name in names if list(names).count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"methods names {twice!r} twice; name each method once")


def check_settings(names: Sequence[str], settings: Plain, also: Sequence[str] = ()) -> None:
    """Refuse a setting that none of the methods has; `also` are names that are understood elsewhere."""
    known = [*dict.fromkeys(s for name in names for s in find_preset(name).settings), *also]
    for setting, value in settings.items():
        if setting not in known:
            who = names[0] if len(names) == 1 else f"none of {', '.join(names)}"
            what = "no such setting" if len(names) == 1 else "such a setting"
            raise UsageError(f"{setting} is {value!r}, but {who} has {what}{hint(setting, known)}")
