"""Scores: metrics as a person reads them, and the mean and spread of several seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from thinwire.observe.results import Row

SHARES = ("top1", "top5", "f1", "em", "wer", "cer", "next_accuracy")
"""Metrics that are a part of a whole and shown in percent."""
NAMES = {"top1": "accuracy"}
"""What some metrics are called where there is no room for doubt."""


def name_metric(metric: str) -> str:
    return NAMES.get(metric, metric)


def format_score(metric: str, value: float) -> str:
    return f"{value:.1%}" if metric in SHARES else f"{value:.4g}"


def format_spread(metric: str, values: Sequence[float]) -> str:
    """The mean, with the standard deviation over the seeds if there are several."""
    mean = format_score(metric, statistics.fmean(values))
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return mean
    spread = statistics.stdev(values)
    return f"{mean} ± {f'{100 * spread:.1f}' if metric in SHARES else f'{spread:.2g}'}"


def group_seeds(rows: Sequence[Row]) -> list[list[Row]]:
    """Runs that differ only in the seed, together; in the order of their first."""
    groups: dict[tuple[str, float | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.method, row.asked_density), []).append(row)
    return list(groups.values())
