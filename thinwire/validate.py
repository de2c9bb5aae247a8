"""Checks of user settings. Each failure is one sentence: field, value, what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from thinwire.errors import UsageError


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_density(field: str, value: Any) -> None:
    if not _is_number(value) or not 0.0 < value <= 1.0:
        raise UsageError(
            f"{field} is {value!r}; it must be a number in (0, 1], the fraction kept (0.01 keeps 1 %)"
        )


def check_finite_number(field: str, value: Any) -> None:
    if not _is_number(value) or not math.isfinite(value):
        raise UsageError(f"{field} is {value!r}; it must be a finite number")


def check_choice(field: str, value: Any, allowed: Iterable[Any]) -> None:
    choices = list(allowed)
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        listed = ", ".join(map(repr, choices))
        raise UsageError(f"{field} is {value!r}; it must be one of {listed}")


def check_bool(field: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{field} is {value!r}; it must be True or False")


def check_instance(field: str, value: Any, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        raise UsageError(f"{field} is {value!r}; it must be {what}")


def check_axis(field: str, value: Any) -> None:
    if isinstance(value, bool) or not (value in ("auto", "published") or isinstance(value, int)):
        raise UsageError(f"{field} is {value!r}; it must be 'auto', 'published' or an axis number")


def check_positive_int(field: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{field} is {value!r}; it must be a whole number of at least 1")


def check_positive_number(field: str, value: Any) -> None:
    if not _is_number(value) or not (math.isfinite(value) and value > 0):
        raise UsageError(f"{field} is {value!r}; it must be a positive number")


def check_interleave(field: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
        raise UsageError(
            f"{field} is {value!r}; it must be a whole number of at least 2 (2 makes every second step global)"
        )
