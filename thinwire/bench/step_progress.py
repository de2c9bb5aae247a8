"""What a user sees while cells are measured: a bar on a terminal, plain lines elsewhere, both with what is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from thinwire.bench.step_cell import StepCell
from thinwire.tools.tables import say

START_S = 6.0
"""Beside its timed steps a cell takes about so long, before it is known."""


class Estimate:
    """How long the rest will take: by the cells' own limits at first, corrected by what those before them took."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._expected: float | None = None

    def seconds(self, left: Sequence[StepCell]) -> float:
        """For the cells that are left; the first call is before any was measured."""
        expected = sum(START_S + cell.seconds for cell in left)
        if self._expected is None:
            self._began, self._expected = self._clock(), expected
        done = self._expected - expected
        return expected * ((self._clock() - self._began) / done if done > 0 else 1.0)


def describe_time(seconds: float) -> str:
    """As exact as an estimate is."""
    if seconds < 90:
        return f"{max(5, round(seconds / 5) * 5)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class StepProgress:
    """Takes the lines and the count of `run_cells`; a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._estimate = Estimate()
        self._total = 0
        self._lock = threading.Lock()
        self._bar = Progress(
            TextColumn("measuring"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, left="")

    def say(self, line: str) -> None:
        with self._lock:
            say(self._bar.console, line)
            if not self._console.is_terminal:
                self._console.file.flush()

    def count(self, left: Sequence[StepCell]) -> None:
        """So many are left, at first and after every cell."""
        self._total = max(self._total, len(left))
        done = self._total - len(left)
        about = f"about {describe_time(self._estimate.seconds(left))} left" if left else ""
        self._bar.update(self._task, total=self._total, completed=done, left=about)
        if left and not self._console.is_terminal:
            self.say(f"{done} of {self._total} measured, {about}")

    def __enter__(self) -> StepProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
