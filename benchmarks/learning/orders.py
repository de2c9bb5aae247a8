"""Orders: what the sitting and the processes that train for it say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Event = tuple[str, str, Any]
"""(key of the order, "pace" | "epoch" | "done" | "failed" | "stopped" | "late", content), or ("", "tick", None) now and then."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """A cell to be trained, as plain values."""

    key: str
    settings: dict[str, Any]
    deadline: float
    """On the monotonic clock, which all processes share."""
    fewest: int | None = None
    """If the number of epochs is not settled: it will be told while the cell runs, and is not below this one."""


@dataclass(frozen=True)
class Epochs:
    """Tells a cell how many epochs it has; the rate has not begun to fall yet, so that nothing has to be done again."""

    count: int


class Stop:
    """Tells a cell to make room."""
