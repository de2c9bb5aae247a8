"""Scores: metrics as a person reads them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

SHARES = ("top1", "top5", "f1", "em", "wer", "cer", "next_accuracy")
"""Metrics that are a part of a whole and shown in percent."""
NAMES = {"top1": "accuracy"}
"""What some metrics are called where there is no room for doubt."""
CLOSE_POINTS = 0.01
"""How much of a share a method may lose and still count as no worse."""
CLOSE_PART = 0.02
"""The same for scores that are no share, as a part of the reference."""


def name_metric(metric: str) -> str:
    return NAMES.get(metric, metric)


def format_score(metric: str, value: float) -> str:
    return f"{value:.1%}" if metric in SHARES else f"{value:.4g}"


def is_worse(metric: str, score: float, reference: float, *, higher_is_better: bool) -> bool:
    """Whether a score is behind the reference by more than counts as no worse; one that was lost always is."""
    room = CLOSE_POINTS if metric in SHARES else CLOSE_PART * abs(reference)
    behind = reference - score if higher_is_better else score - reference
    return not behind <= room


def format_spread(metric: str, values: Sequence[float]) -> str:
    """The mean, with the standard deviation over the seeds if there are several."""
    mean = format_score(metric, statistics.fmean(values))
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return mean
    spread = statistics.stdev(values)
    return f"{mean} ± {f'{100 * spread:.1f}' if metric in SHARES else f'{spread:.2g}'}"
