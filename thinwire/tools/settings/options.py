"""Options: the fields of settings dataclasses on the command line, a panel of the help for each dataclass.

A command is a function under `@command`:

    @command
    def bench(context: typer.Context, *, how: Timing, training: Said = said(Training, "lr"), dry_run: DryRun = False):

A parameter whose type is a dataclass becomes an option per field; the function gets the dataclass. A parameter whose default is
`said(...)` becomes options for some fields; the function gets a dict of what was typed, and takes the rest from elsewhere. All other
parameters are typer's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from thinwire.errors import UsageError
from thinwire.tools.settings.building import build, drop_nothing
from thinwire.tools.settings.fields import EITHER_WAY, Field, describe, is_settings

Said = dict[str, Any]
"""What was typed, by field."""

METAVARS: dict[Any, str] = {int: "N", float: "NUMBER", str: "NAME", Path: "PATH"}
LONGEST_METAVAR = 24

DryRun = Annotated[
    bool, typer.Option("--dry-run", metavar="", help="Show what would be done, and start nothing.")
]


@dataclass(frozen=True)
class Group:
    """Options of one dataclass; `title` heads their panel of the help."""

    kind: type
    names: tuple[str, ...] = ()
    """All fields unless some are named."""
    title: str = ""
    only_said: bool = True

    def fields(self) -> list[Field]:
        known = describe(self.kind)
        return [known[name] for name in self.names or known]

    def parameters(self) -> list[inspect.Parameter]:
        return [parameter for field in self.fields() for parameter in self._parameters(field)]

    def _parameters(self, field: Field) -> list[inspect.Parameter]:
        kind, default = typed_as(field), field.default
        if self.only_said or default is None or kind == list[str]:
            kind, default = kind | None, None
        elif field.items is not None:
            default = ",".join(map(str, default))
        settings: dict[str, Any] = {"rich_help_panel": self.title, "show_default": False}
        shown, _, opposite = name_option(field).partition("//")
        text = describe_option(field, with_default=not self.only_said or is_complete(self.kind))
        option = typer.Option(shown, help=text, metavar=metavar_of(field), **settings)
        parameters = [make_parameter(parameter_name(field), kind, option, default)]
        if opposite:
            hidden = typer.Option(opposite, hidden=True)
            parameters.append(make_parameter(f"no_{parameter_name(field)}", bool, hidden, False))
        return parameters

    def read(self, typed: Said) -> Any:
        """Take this group's values out of all that was typed."""
        values = {}
        for field in self.fields():
            name = parameter_name(field)
            values[field.name] = parse(field, typed.pop(name, None))
            if typed.pop(f"no_{name}", False):
                values[field.name] = False
        return drop_nothing(values) if self.only_said else build(self.kind, values, where="")


def said(kind: type, *names: str) -> Any:
    """The default of a parameter that gets what was typed of these fields."""
    return Group(kind, names)


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let typer see the fields of the dataclasses that a function takes."""
    annotations = get_type_hints(function, include_extras=True)
    own: list[inspect.Parameter] = []
    groups: dict[str, Group] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        title = name.replace("_", " ").capitalize()
        if isinstance(parameter.default, Group):
            groups[name] = Group(parameter.default.kind, parameter.default.names, title)
        elif is_settings(annotations[name]):
            groups[name] = Group(annotations[name], title=title, only_said=False)
        else:
            own.append(parameter.replace(annotation=annotations[name]))

    @wraps(function)
    def typed(**given: Any) -> Any:
        read = {name: group.read(given) for name, group in groups.items()}
        return function(**given, **read)

    options = [parameter for group in groups.values() for parameter in group.parameters()]
    every = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own] + options
    typed.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    typed.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    return typed


# -- one option ------------------------------------------------------------------------------------------------


def make_parameter(name: str, kind: Any, option: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[kind, option],
        default=inspect.Parameter.empty if default is MISSING else default,
    )


def parameter_name(field: Field) -> str:
    return field.option.removeprefix("--").replace("-", "_")


def name_option(field: Field) -> str:
    """With its opposite where it is on by default, and with a hidden one (//) where others may have turned it on."""
    name = field.option
    if field.default is True:
        return f"{name}/--no-{name[2:]}"
    return f"{name}//--no-{name[2:]}" if EITHER_WAY in field.notes else name


def is_complete(kind: type) -> bool:
    """Whether all fields have defaults; those of other settings are the task's."""
    return all(field.default is not MISSING for field in describe(kind).values())


def typed_as(field: Field) -> Any:
    """What typer reads: lists come as one text with commas, or as an option that may be repeated."""
    if any(get_origin(kind) in (list, Sequence) for kind in field.kinds):
        return list[str]
    if field.items is not None or field.choices or len(field.kinds) > 1:
        return str
    return field.kinds[0]


def metavar_of(field: Field) -> str:
    if field.kinds == (bool,):
        return ""
    choices = "|".join(map(str, field.choices))
    if field.metavar is not None or 0 < len(choices) <= LONGEST_METAVAR:
        return field.metavar or choices
    return METAVARS.get(field.items or field.kinds[0], "NAME") + (",..." if field.items else "")


def describe_option(field: Field, with_default: bool) -> str:
    default, shown = field.default, ""
    nothing = default in (None, MISSING, "", ()) or default == [] or isinstance(default, bool)
    if with_default and not nothing:
        listed = ", ".join(map(str, default)) if field.items is not None else default
        shown = f" (default {listed})"
    # Brackets are rich's.
    return f"{field.text}{shown}".replace("[", "\\[")


def parse(field: Field, value: Any) -> Any:
    """What was typed as the field wants it."""
    if field.items is not None and isinstance(value, str):
        return parse_list(field, value)
    if isinstance(value, str) and int in field.kinds:
        return int(value) if value.lstrip("-").isdecimal() else value
    return value


def parse_list(field: Field, text: str) -> tuple[Any, ...]:
    """Names or numbers with commas between them."""
    what = {int: "whole numbers", float: "numbers"}.get(field.items, "names")
    try:
        return tuple(field.items(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        name = parameter_name(field)
        raise UsageError(f"{name} is {text!r}; it must be {what} with commas between") from None
