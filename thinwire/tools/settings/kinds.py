"""Kinds of settings: annotations that say what a value may be, and the checks behind them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from thinwire.errors import UsageError
from thinwire.validate import (
    check_density,
    check_finite_number,
    check_instance,
    check_positive_int,
    check_positive_number,
)

LARGEST = 2**63 - 1
"""Whole numbers beyond it fit no tensor, file or generator."""
MOST_RANKS = 65536


def check_fits(name: str, value: int) -> None:
    if value > LARGEST:
        raise UsageError(f"{name} is {value!r}; it must be at most {LARGEST}")


def check_ranks(name: str, value: Any) -> None:
    check_positive_int(name, value)
    if value > MOST_RANKS:
        raise UsageError(f"{name} is {value!r}; it must be at most {MOST_RANKS}")


def check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(f"{name} is {value!r}; it must be a whole number of at least 0")


def check_above_zero(name: str, value: Any) -> None:
    check_finite_number(name, value)
    if value <= 0:
        raise UsageError(f"{name} is {value!r}; it must be above 0")


def check_not_negative(name: str, value: Any) -> None:
    check_finite_number(name, value)
    if value < 0:
        raise UsageError(f"{name} is {value!r}; it must be 0 or more")


def check_positive_ints(name: str, values: Any) -> None:
    check_instance(name, values, list | tuple, "a list of whole numbers")  # type: ignore[arg-type]
    for value in values:
        check_positive_int(name, value)
        check_fits(name, value)


def check_new_file(name: str, value: Any) -> None:
    """Refuse a file that could not be written at the end of a long run."""
    check_instance(name, value, Path, "the path of a file")
    parent = value.absolute().parent
    if value.is_dir() or not parent.is_dir():
        raise UsageError(f"{name} is '{value}'; it must be a file in a folder that is there")
    if not os.access(parent, os.W_OK):
        raise UsageError(f"{name} is '{value}'; it must be in a folder that can be written to")


def check_new_folder(name: str, value: Any) -> None:
    """Refuse a folder that is none, or could not be made."""
    check_instance(name, value, Path, "the path of a folder")
    above = value.absolute()
    while not os.path.lexists(above):
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UsageError(f"{name} is '{value}'; it must be a folder that can be written to")


Count = Annotated[int, check_count, check_fits]
Positive = Annotated[int, check_positive_int, check_fits]
Ranks = Annotated[int, check_ranks]
Positives = Annotated[tuple[int, ...], check_positive_ints]
AboveZero = Annotated[float, check_above_zero]
PositiveNumber = Annotated[float, check_positive_number]
NotNegative = Annotated[float, check_not_negative]
Density = Annotated[float, check_density, "FRACTION"]
Folder = Annotated[Path, "FOLDER"]
File = Annotated[Path, "FILE"]
NewFile = Annotated[Path, check_new_file, "FILE"]
NewFolder = Annotated[Path, check_new_folder, "FOLDER"]
