"""Fitting a model to data: what does not fit, or is not installed, is said in one sentence."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TypeVar

from thinwire.errors import UsageError
from thinwire.recipes.kinds import Kind

Wanted = TypeVar("Wanted", bound=Kind)


def expect_kind(model: str, kind: Kind, wanted: type[Wanted]) -> Wanted:
    """The kind, if the model can learn from it."""
    if not isinstance(kind, wanted):
        raise misfit(model, kind, wanted)
    return kind


def misfit(model: str, kind: Kind, *wanted: type[Kind]) -> UsageError:
    learns = " or ".join(one.__name__.lower() for one in wanted)
    return UsageError(
        f"model is {model!r}, which learns from {learns}; the data are {type(kind).__name__.lower()}"
    )


def check_length(model: str, length: int, longest: int) -> None:
    if length > longest:
        raise UsageError(
            f"model is {model!r}, which reads {longest} tokens; the data have {length}"
        )


def check_vocabulary(name: str, known: int, needed: int) -> None:
    if known != needed:
        raise UsageError(
            f"model is {name!r}, whose pretrained weights know {known} tokens; the data have {needed}"
        )


def import_transformers(model: str) -> ModuleType:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise UsageError(
            f"model is {model!r}, which needs the package 'transformers'; pip install 'thinwire[text]'"
        ) from None
