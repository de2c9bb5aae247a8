"""Pace: how long a run took to a score, in seconds spent in training steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from thinwire.tools.metrics import Record
from thinwire.tools.results import Row


def seconds_to(
    target: float, group: Sequence[Row], steps: Mapping[str, Sequence[Record]]
) -> float | None:
    """Until a test first was as good as `target`, the mean over the seeds; None if one of them never was, or was not timed."""
    found = [seconds_of_run(target, row, steps.get(row.run, ())) for row in group]
    reached = [seconds for seconds in found if seconds is not None]
    return statistics.fmean(reached) if len(reached) == len(group) else None


def seconds_of_run(target: float, row: Row, steps: Sequence[Record]) -> float | None:
    """Of one run, from the times of its steps; tests themselves are not counted."""
    good = (step for step, score in row.tests if is_good(score, target, row.higher_is_better))
    first = next(good, None)
    if first is None:
        return None
    spent = [record.get("ms") for record in steps if record["step"] <= first]
    if None in spent or len(spent) < first:
        return None
    return sum(ms for ms in spent if ms is not None) / 1e3


def is_good(score: float | None, target: float, higher_is_better: bool) -> bool:
    """A score that was lost, which a file has as null, never is."""
    if score is None or math.isnan(score):
        return False
    return score >= target if higher_is_better else score <= target
