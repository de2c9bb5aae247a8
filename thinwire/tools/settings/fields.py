"""Fields: what a settings dataclass says about each of its settings.

The annotation says what is allowed. `Annotated` adds checks (functions of name and value) and words for the command line:
an option's name ("--density") and what stands for its value in the help ("FRACTION").
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

Check = Callable[[str, Any], None]
EITHER_WAY = object()
"""In `Annotated`, of a truth value that a task or a file may have turned on: an option turns it off again."""


@dataclass(frozen=True)
class Field:
    """One setting."""

    owner: type
    """The dataclass that it is a field of."""
    name: str
    kinds: tuple[Any, ...]
    """The types that its value may have, None apart."""
    optional: bool
    """Whether its value may be None."""
    notes: tuple[Any, ...]
    """What `Annotated` adds."""
    default: Any
    """MISSING where there is none."""

    @property
    def text(self) -> str:
        """The docstring under it."""
        return read_texts(self.owner).get(self.name, "")

    @property
    def checks(self) -> list[Check]:
        return [note for note in self.notes if callable(note)]

    @property
    def option(self) -> str:
        """What it is called on the command line."""
        named = [note for note in self.notes if isinstance(note, str) and note.startswith("--")]
        return named[0] if named else f"--{self.name.strip('_').replace('_', '-')}"

    @property
    def metavar(self) -> str | None:
        """What stands for its value in help, if it says so."""
        words = (note for note in self.notes if isinstance(note, str))
        return next((word for word in words if not word.startswith("--")), None)

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of its Literal; none where any value of its types will do."""
        literals = (get_args(kind) for kind in self.kinds if get_origin(kind) is Literal)
        return tuple(value for values in literals for value in values)

    @property
    def items(self) -> Any:
        """The type of the items, if its value is a tuple of them; else None."""
        tuples = (get_args(kind) for kind in self.kinds if get_origin(kind) is tuple)
        return next((items[0] for items in tuples), None)

    @property
    def part(self) -> type | None:
        """The class of the part that it holds, if it holds one with settings of its own."""
        return next((kind for kind in self.kinds if is_settings(kind)), None)


def describe(kind: type) -> dict[str, Field]:
    """The settings of a dataclass by name, in order."""
    return describe_once(kind)


@cache
def describe_once(kind: type) -> dict[str, Field]:
    annotations = get_type_hints(kind, include_extras=True)
    found = {}
    for field in dataclasses.fields(kind):
        kinds, notes = split_annotation(annotations[field.name])
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        plain = tuple(one for one in kinds if one is not NoneType)
        found[field.name] = Field(kind, field.name, plain, NoneType in kinds, tuple(notes), default)
    return found


def split_annotation(annotation: Any) -> tuple[list[Any], list[Any]]:
    """The alternatives of a union, and what `Annotated` adds to any of them."""
    if get_origin(annotation) is Annotated:
        inner, *added = get_args(annotation)
        kinds, notes = split_annotation(inner)
        return kinds, [*notes, *added]
    if get_origin(annotation) not in (Union, UnionType):
        return [annotation], []
    parts = [split_annotation(one) for one in get_args(annotation)]
    return [kind for kinds, _ in parts for kind in kinds], [n for _, notes in parts for n in notes]


def is_settings(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


@cache
def read_texts(kind: type) -> dict[str, str]:
    """The docstring under each field, in one line. {NAMES} becomes what the dataclass's module lists under that name."""
    texts: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if is_settings(owner):
            listed = vars(sys.modules[owner.__module__])
            for name, text in read_own_texts(owner).items():
                for word in re.findall(r"\{(\w+)\}", text):
                    text = text.replace(f"{{{word}}}", ", ".join(listed[word]))
                texts[name] = text
    return texts


def read_own_texts(kind: type) -> dict[str, str]:
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError):
        # Without its source there is no text.
        return {}
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in pairwise(definition.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str())):
                found[name] = " ".join(text.value.value.split())  # type: ignore[attr-defined]
    return found
