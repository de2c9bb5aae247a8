"""Names: what a user may call, and what he probably meant."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from thinwire.errors import UsageError


def hint(wrong: str, known: Iterable[str]) -> str:
    """' (did you mean x?)', or nothing if no name is near."""
    near = difflib.get_close_matches(wrong, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def look_up(what: str, name: str, places: Mapping[str, str]) -> Any:
    """What stands at the place of a name, given as 'module:attribute'; imported when it is asked for."""
    if name not in places:
        listed = ", ".join(places)
        raise UsageError(f"{what} is {name!r}; it must be one of {listed}{hint(name, places)}")
    module, _, attribute = places[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
