"""Exposure: how long steps wait for nothing but the exchange."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from thinwire.observe.clock import Mark

FIRST = 16
EVERY = 16
"""The first so many steps are looked at, then one of so many: on CUDA a mark is an event, which costs the host microseconds."""
KEPT = 64


@dataclass(eq=False)
class StepEnd:
    """The end of one step that was looked at."""

    step: int
    ready: Mark | None = None
    """When its last bucket was ready."""
    delivered: Mark | None = None
    """When its last update was there."""


class ExposureClock:
    """From the moment at which a step's last bucket is ready to the one at which its last update is there.

    Where `wanted` is False nothing is marked: simulated workers have no link, and local steps go on meanwhile.
    """

    def __init__(self, device: torch.device, *, wanted: bool) -> None:
        self.wanted = wanted
        self._device = device
        self._looking = True
        self.ends: deque[StepEnd] = deque(maxlen=KEPT)
        """Of the last steps."""

    def mark(self) -> Mark | None:
        """Now, if this step is looked at."""
        return Mark(self._device) if self.wanted and self._looking else None

    def note(self, step: int, ready: Mark | None) -> list[Callable[[], None]]:
        """A bucket of this step was ready then. What is returned is to be called when its update is there."""
        if not self.ends or self.ends[-1].step != step:
            self._looking = step <= FIRST or step % EVERY == 0
            if ready is None:
                return []
            self.ends.append(StepEnd(step))
        end = self.ends[-1]
        # Also where there is no mark: then the last bucket of this step was not looked at.
        end.ready = ready

        def deliver() -> None:
            end.delivered = Mark(self._device)

        return [] if ready is None else [deliver]

    def milliseconds(self) -> float | None:
        """The median over the steps that were looked at lately; None if there is none. On CUDA it waits for the last of them."""
        found = [
            max(0.0, end.delivered.ms_since(end.ready))
            for end in list(self.ends)
            if end.ready is not None and end.delivered is not None
        ]
        return median(found) if found else None
