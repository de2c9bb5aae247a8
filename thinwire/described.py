"""Described: classes of settings whose `help()` tells every setting, from the texts under their fields."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from pathlib import Path
from typing import Any


class Described:
    """Adds an Args section to the docstring of every subclass: one entry per field that has a text under it."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        texts = field_texts(cls)
        if texts and "Args:" not in (cls.__doc__ or ""):
            described = "\n".join(f"    {name}: {text}" for name, text in texts.items())
            cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nArgs:\n{described}\n"


def field_texts(cls: type) -> dict[str, str]:
    """The text under each field of a class and of those it inherits from; in the order of dataclass fields."""
    texts: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        texts.update(_class_texts(one.__module__).get(one.__qualname__, {}))
    return texts


@functools.cache
def _class_texts(module: str) -> dict[str, dict[str, str]]:
    """By class: what stands under the fields in its source; nothing where there is no source."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if not file or not file.endswith(".py"):
        return {}
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return {}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {node.name: _texts(node) for node in classes if _is_dataclass(node)}


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.dump(decorator) for decorator in node.decorator_list)


def _texts(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
            and "ClassVar" not in ast.dump(field.annotation)
        ):
            found[field.target.id] = " ".join(below.value.value.split())
    return found
