"""Names: what a user may call, and what was probably meant."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from thinwire.errors import UsageError


def hint(wrong: str, known: Iterable[str]) -> str:
    """' (did you mean x?)', or nothing if no name is near."""
    near = difflib.get_close_matches(wrong, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def check_name(what: str, name: str, known: Iterable[str], or_else: str = "") -> None:
    """Refuse a name that is not known; `or_else` says what else may stand there."""
    listed = list(known)
    if name not in listed:
        allowed = f"{', '.join(listed)}{or_else}"
        raise UsageError(f"{what} is {name!r}; it must be one of {allowed}{hint(name, listed)}")


def look_up(what: str, name: str, places: Mapping[str, str]) -> Any:
    """What stands at the place of a name, given as 'module:attribute'; imported when it is asked for."""
    check_name(what, name, places)
    module, _, attribute = places[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def import_own(what: str, name: str) -> Any:
    """What the user calls 'module:attribute'; None if the module has no such thing."""
    module, _, attribute = name.partition(":")
    if not module or module.startswith("."):
        raise UsageError(f"{what} is {name!r}; it must be module:attribute, as in my_tasks:TASK")
    if "" not in sys.path:
        # As `python -m` does; the installed command does not look where the user is.
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise UsageError(f"{what} is {name!r}, but there is no module {error.name!r}") from None
    except SystemExit:
        # With a code of 0 it would look like a job that was done.
        raise UsageError(
            f"{what} is {name!r}, but {module} ends the program when it is imported"
        ) from None
