"""Building: a settings dataclass from plain values, as files and the command line have them.

A field that holds a part (memory, exchange, clip) takes a table of the part's own fields, with `kind` for another part:
`memory = { masking = false }`, `exchange = { kind = "SplitReduce" }`. The dataclass judges the values; here only names are
judged.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any, TypeVar

from thinwire.errors import UsageError
from thinwire.tools.settings.fields import Field, describe, is_settings
from thinwire.tools.settings.kinds import check_count
from thinwire.tools.settings.names import hint
from thinwire.validate import check_bool, check_choice, check_finite_number, check_instance

Plain = Mapping[str, Any]
"""Settings by name: text, numbers, truth values, lists, tables."""
Built = TypeVar("Built")

NOTHING = "none"
"""How a file says None where the default is something else."""
PUBLIC = ("", ".methods", ".memory", ".exchange", ".select", ".wire", ".plan")
"""Where thinwire's own classes can be found by name."""


def build(
    kind: type[Built], values: Plain, *, where: str, of: str = "", base: Built | None = None
) -> Built:
    """A dataclass from plain values; None among them counts as not said.

    What is not said is as in `base`, or as its default. `where` (the section) and `of` (what these are settings of) are for
    the sentence about a wrong name.
    """
    fields = describe(kind)
    check_names(where, values, fields, of)
    given = {
        name: convert(fields[name], value, current(fields[name], base))
        for name, value in drop_nothing(values).items()
    }
    if base is not None:
        return replace(base, **given)  # type: ignore[type-var]
    for name, field in fields.items():
        if field.default is MISSING and name not in given:
            raise UsageError(f"{where}.{name} is missing; {kind.__name__} needs it")
    return kind(**given)


def check_names(where: str, given: Iterable[str], known: Iterable[str], of: str = "") -> None:
    """Refuse a name that a section does not have."""
    allowed = list(known)
    for name in given:
        if name not in allowed:
            suffix = hint(name, allowed) or f"; {where} has {', '.join(allowed)}"
            raise UsageError(f"{where}.{name} is no setting{of}{suffix}")


def drop_nothing(values: Plain) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def current(field: Field, base: Any) -> Any:
    return field.default if base is None else getattr(base, field.name)


def convert(field: Field, value: Any, default: Any) -> Any:
    """A plain value as the field wants it; what it does not want is left for the dataclass to refuse."""
    if isinstance(value, Mapping):
        return build_part(field, value, default)
    if isinstance(value, list) and field.items is not None:
        return tuple(value)
    if not isinstance(value, str):
        return value
    if value == NOTHING and field.optional and str not in field.kinds:
        return None
    if Path in field.kinds:
        return Path(value)
    if any(getattr(kind, "__name__", "") == "dtype" for kind in field.kinds):
        return getattr(importlib.import_module("torch"), value, value)
    return value


def build_part(field: Field, values: Plain, default: Any) -> Any:
    """A part from its own fields: the default with some of them changed, or another kind."""
    own = {key: value for key, value in values.items() if key != "kind"}
    if "kind" in values:
        kind = find_public(str(values["kind"]))
        if not is_settings(kind):
            raise UsageError(
                f"{field.name}.kind is {values['kind']!r}; it must be the name of a part of thinwire, such as Residual"
            )
        default = None
    else:
        kind = type(default) if is_settings(type(default)) else field.part
    if kind is None:
        raise UsageError(
            f"{field.name} is {dict(values)!r}; it holds no part with settings of its own"
        )
    base = default if isinstance(default, kind) else None
    return build(kind, own, where=field.name, of=f" of {kind.__name__}", base=base)


def find_public(name: str) -> Any:
    """A public class of thinwire by its name; None if there is none."""
    modules = (importlib.import_module(f"thinwire{place}") for place in PUBLIC)
    return next((found for module in modules if (found := getattr(module, name, None))), None)


# -- judging ---------------------------------------------------------------------------------------------------


def check_fields(settings: Any) -> None:
    """For `__post_init__`: refuse a value that its field's annotation does not allow."""
    for field in describe(type(settings)).values():
        value = getattr(settings, field.name)
        if value is not None or not field.optional:
            check_value(field, value)


def check_value(field: Field, value: Any) -> None:
    if field.checks:
        for check in field.checks:
            check(field.name, value)
    elif field.choices:
        check_choice(field.name, value, field.choices)
    elif field.items is not None:
        check_items(field.name, value, field.items)
    elif field.kinds == (bool,):
        check_bool(field.name, value)
    elif field.kinds == (Path,):
        what = (field.metavar or "file or folder").lower()
        check_instance(field.name, value, Path, f"the path of a {what}")
    elif field.kinds == (str,):
        check_instance(field.name, value, str, "a text")


def check_items(name: str, values: Any, kind: type) -> None:
    what = "names" if kind is str else "numbers"
    check_instance(name, values, list | tuple, f"a list of {what}")  # type: ignore[arg-type]
    for value in values:
        if kind is str:
            check_instance(name, value, str, f"a list of {what}")
        elif kind is int:
            check_count(name, value)
        else:
            check_finite_number(name, value)


# -- back to plain values --------------------------------------------------------------------------------------


def to_plain(settings: Any) -> dict[str, Any]:
    """The fields of a settings dataclass as plain values."""
    fields = dataclasses.asdict(settings)
    return {key: str(one) if isinstance(one, Path) else one for key, one in fields.items()}
