"""Planning: how long cells take, and how many epochs can be had."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from learning.cells import Cell, Study

RESERVE = 1.1
"""Probes are short, and the mixture of methods changes while cells come and go."""


@dataclass(frozen=True)
class Rate:
    """What one cell of a method takes, beside so many others as there are seats."""

    setup_s: float
    step_s: float
    test_s: float
    steps_per_epoch: int

    def seconds(self, epochs: int) -> float:
        return self.setup_s + epochs * (self.steps_per_epoch * self.step_s + self.test_s)

    def __str__(self) -> str:
        return (
            f"{1000 * self.step_s:.1f} ms per step, {self.steps_per_epoch} steps per epoch, {self.test_s:.2f} s per "
            f"test, {self.setup_s:.1f} s to begin"
        )


class Pace:
    """By method; learned from probes and corrected by the cells that were finished."""

    def __init__(self) -> None:
        self.rates: dict[str, Rate] = {}
        self._corrections: dict[str, float] = {}

    def learn(self, method: str, measured: Mapping[str, Any]) -> None:
        """From a probe; of several the slowest counts."""
        entry = measured["entry"]
        rate = Rate(
            setup_s=measured["setup_s"],
            step_s=entry["ms_per_step"] / 1000,
            test_s=measured["test_s"],
            steps_per_epoch=entry["steps_per_epoch"],
        )
        known = self.rates.get(method)
        if known is None or rate.step_s > known.step_s:
            self.rates[method] = rate

    def correct(self, method: str, epochs: int, seconds: float) -> None:
        if method in self.rates:
            self._corrections[method] = seconds / self.rates[method].seconds(epochs)

    def seconds(self, method: str, epochs: int) -> float:
        """What a cell is expected to take; a method that was never timed is taken for the slowest."""
        rate = self.rates.get(method)
        if rate is None:
            return max(self.seconds(known, epochs) for known in self.rates)
        return rate.seconds(epochs) * self._corrections.get(method, RESERVE)


def finish_time(durations: Sequence[float], seats: int) -> float:
    """When the last one ends if they are begun in this order, each on the seat that is free first."""
    free = [0.0] * seats
    for seconds in durations:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def choose_epochs(
    cells: Sequence[Cell], pace: Pace, seats: int, available_s: float, study: Study
) -> int:
    """As many as let these cells finish in the time there is, within the study's bounds."""
    for epochs in range(study.most, study.fewest, -1):
        planned = [replace(cell, epochs=epochs) for cell in cells]
        durations = sorted((pace.seconds(c.method, epochs) for c in planned), reverse=True)
        if finish_time(durations, seats) <= available_s:
            return epochs
    return study.fewest
