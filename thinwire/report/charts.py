"""Charts: curves as plain numbers, which the page's script draws against the axis that the reader chose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

MOST_POINTS = 600
"""Of a curve; more than a screen can show."""


@dataclass(frozen=True)
class Axis:
    """What a chart can be drawn against."""

    key: str
    """In the address of the page: #axis=bytes."""
    button: str
    label: str
    log: bool = False


@dataclass(frozen=True)
class Curve:
    """One line. `x` holds a list per axis; `low` and `high` are the range around `y`, `faint` what it was smoothed from."""

    name: str
    colour: int
    dash: int
    x: dict[str, list[float | None]]
    y: list[float | None]
    low: list[float | None] = field(default_factory=list)
    high: list[float | None] = field(default_factory=list)
    faint: list[float | None] = field(default_factory=list)


@dataclass(frozen=True)
class Chart:
    title: str
    y: str
    axes: Sequence[Axis]
    curves: Sequence[Curve]
    log_y: bool = False
    dots: bool = False
    """Every point was measured by itself."""
    about: str = ""

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


def thin(count: int) -> list[int]:
    """Which of `count` points are kept: the first, the last and evenly between."""
    if count <= MOST_POINTS:
        return list(range(count))
    return [round(i * (count - 1) / (MOST_POINTS - 1)) for i in range(MOST_POINTS)]


def plain(values: Sequence[float]) -> list[float | None]:
    """Numbers that JSON has, with as many digits as a screen can show; None for those that were lost."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
