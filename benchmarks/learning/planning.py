"""Planning: how long cells take, and how many epochs can be had.

There is no separate probe: what is measured are the first steps of the cells themselves. A time goes with the number of cells that
ran side by side when it was measured. They share one device, so that with fewer of them each is faster, in proportion; but never
more than twice as fast is counted on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from learning.cells import Study

RESERVE = 1.1
"""What plans add: first steps are few, and the mixture of methods changes while cells come and go."""
SETUP_S = 25.0
"""From an order to the first step, before one was measured."""
LIGHTEST = 0.5
"""What is left of an epoch's time when fewer and fewer cells run."""


@dataclass(frozen=True)
class Rate:
    """What one cell of a method takes, with `load` cells side by side."""

    setup_s: float
    epoch_s: float
    """With its test."""
    load: float

    def at(self, load: float) -> float:
        """Seconds per epoch if so many cells run."""
        return self.epoch_s * max(load / self.load, LIGHTEST)


class Pace:
    """Rates by method, the latest that was heard of each."""

    def __init__(self) -> None:
        self.rates: dict[str, Rate] = {}

    def hear(self, method: str, measured: Mapping[str, Any], load: float) -> None:
        self.rates[method] = Rate(measured["setup_s"], measured["epoch_s"], load)

    def hear_rows(self, rows: Iterable[Mapping[str, Any]], load: float) -> None:
        """From an earlier sitting; `load` where a row does not say."""
        for row in rows:
            epoch_s = row["seconds"] / row["epochs"]
            self.rates[row["method"]] = Rate(SETUP_S, epoch_s, row.get("side_by_side", load))

    def rate(self, method: str) -> Rate:
        """A method that was never timed is taken for the slowest."""
        return self.rates.get(method) or max(self.rates.values(), key=lambda rate: rate.at(1))


@dataclass(frozen=True)
class Pending:
    """A cell that is not finished."""

    method: str
    done: float | None = None
    """Epochs; None: it is still to begin."""

    def seconds(self, pace: Pace, epochs: int, load: float) -> float:
        """What is left of it."""
        rate = pace.rate(self.method)
        setup_s = rate.setup_s if self.done is None else 0.0
        return setup_s + (epochs - (self.done or 0.0)) * rate.at(load)


def finish_time(durations: Sequence[float], seats: int) -> float:
    """When the last one ends if they are begun in this order, each on the seat that is free first."""
    free = [0.0] * seats
    for seconds in durations:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def plan_seconds(
    pending: Sequence[Pending], pace: Pace, seats: int, epochs: int, load: int | None = None
) -> float:
    """Until all of these are finished, with some reserve; side by side with nobody else, or with `load` cells in all."""
    load = load or min(seats, len(pending))
    return RESERVE * finish_time([one.seconds(pace, epochs, load) for one in pending], seats)


def choose_epochs(
    pending: Sequence[Pending], pace: Pace, seats: int, available_s: float, study: Study
) -> int:
    """As many as let these cells, in this order, finish in the time there is, within the study's bounds."""
    for epochs in range(study.most, study.fewest, -1):
        if plan_seconds(pending, pace, seats, epochs) <= available_s:
            return epochs
    return study.fewest
