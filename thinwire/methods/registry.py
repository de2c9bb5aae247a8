"""Registry: the names that methods have on the command line, and the options they share there."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.errors import UsageError
from thinwire.methods.adtopk import ADTopK
from thinwire.methods.base import Dense, Method
from thinwire.methods.topk import TopK
from thinwire.select.rows import Axis


class Preset:
    """A method class and the settings its name stands for; shared options fill in the rest."""

    def __init__(self, kind: type[Method], **fixed: Any) -> None:
        self.kind = kind
        self.fixed = fixed

    def takes(self, option: str) -> bool:
        return option in {field.name for field in dataclasses.fields(self.kind)}


METHODS: dict[str, Preset] = {
    "dense": Preset(Dense),
    "topk": Preset(TopK),
    "adtopk": Preset(ADTopK),
}
"""One line per name, in the order in which they are listed to the user."""


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """What can be set for any method that has it; None leaves the method's own default.

    Each field has the name of a field of the methods that take it.
    """

    density: float | None = None
    values: str | None = None
    axis: Axis | None = None

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


def find_preset(name: str) -> Preset:
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(f"method is {name!r}; it must be one of {', '.join(METHODS)}{hint}")
    return METHODS[name]


def build_method(name: str, options: MethodOptions) -> Method:
    """The method of that name with the options it takes; the others do not concern it."""
    preset = find_preset(name)
    chosen = {key: value for key, value in options.given().items() if preset.takes(key)}
    return preset.kind(**{**preset.fixed, **chosen})


def build_methods(names: Sequence[str], options: MethodOptions) -> dict[str, Method]:
    """Build each named method once; refuse an option that none of them takes."""
    if not names:
        raise UsageError(f"methods is empty; name at least one of {', '.join(METHODS)}")
    twice = next((name for name in names if list(names).count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"methods names {twice!r} twice; name each method once")
    presets = [find_preset(name) for name in names]
    for option, value in options.given().items():
        if not any(preset.takes(option) for preset in presets):
            raise UsageError(f"{option} is {value!r}, but {_listed(names)} has no such setting")
    return {name: build_method(name, options) for name in names}


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"none of {', '.join(names)}"
