"""Comparison: the results of several methods in a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from thinwire.tools.metrics import Record
from thinwire.tools.pace import seconds_to
from thinwire.tools.results import Row, group_seeds
from thinwire.tools.scores import format_score, format_spread, is_worse, name_metric
from thinwire.tools.tables import TIGHT

SCORE, DENSE_BYTES = 3, 4
"""The columns of the score and of what dense would send."""


def results_table(
    rows: Sequence[Row],
    title: str,
    target: float | None = None,
    steps: Mapping[str, Sequence[Record]] | None = None,
) -> Table:
    """One line per method and density, over all seeds; MB are 10^6 bytes that one worker sends.

    A score that is worse than dense is red. With a target, the seconds to it are shown, from the runs' `steps`.
    """
    groups = group_seeds(rows)
    worse = losers(groups)
    score = f"test\n{name_metric(rows[0].metric)}"
    headings = ["method", "density\nasked", "density\nsent", score, "MB/step\ndense"]
    headings += ["MB/step\nsent", "ratio", "ms/step", "replicas\nidentical"]
    lines: list[list[str | Text]] = [list(cells(group)) for group in groups]
    if target is not None:
        headings.insert(-1, f"seconds\nto {format_target(rows[0].metric, target)}")
        # Room in a terminal of 80; the dense line says the same.
        del headings[DENSE_BYTES]
        for line, group in zip(lines, groups, strict=True):
            line.insert(-1, format_seconds(seconds_to(target, group, steps or {})))
            del line[DENSE_BYTES]
    for line, lost in zip(lines, worse, strict=True):
        if lost:
            line[SCORE] = Text(str(line[SCORE]), style="bold red")
    if any(len(group) > 1 for group in groups):
        headings.insert(4, "seeds")
        for line, group in zip(lines, groups, strict=True):
            line.insert(4, str(len(group)))
    # One space between columns: it fits a terminal of 80.
    table = Table(*headings, title=title, title_justify="left", padding=(0, 1, 0, 0), **TIGHT)
    for column in table.columns[1:]:
        column.justify = "right"
    for line in lines:
        table.add_row(*line)
    return table


def cells(group: Sequence[Row]) -> tuple[str, ...]:
    """One line: what the seeds of a method and density did on average."""
    first = group[0]
    dense, sent = (
        statistics.fmean(getattr(row, f"{kind}_bytes_per_step") for row in group) / 1e6
        for kind in ("dense", "wire")
    )
    milliseconds = [row.ms_per_step for row in group if row.ms_per_step is not None]
    return (
        first.method,
        "-" if first.asked_density is None else percent(first.asked_density),
        percent(statistics.fmean(row.density for row in group)),
        format_spread(first.metric, [row.score for row in group]),
        f"{dense:.4f}",
        f"{sent:.4f}",
        f"{statistics.fmean(row.ratio for row in group):.1f}x",
        f"{statistics.median(milliseconds):.1f}" if milliseconds else "-",
        "yes" if all(row.replicas_identical for row in group) else "NO",
    )


def losers(groups: Sequence[Sequence[Row]]) -> list[bool]:
    """Which groups score worse than the dense one among them; without one, none."""
    means = [statistics.fmean(row.score for row in group) for group in groups]
    dense = next(
        (mean for mean, group in zip(means, groups, strict=True) if group[0].method == "dense"),
        None,
    )
    if dense is None:
        return [False] * len(groups)
    return [
        is_worse(group[0].metric, mean, dense, higher_is_better=group[0].higher_is_better)
        for mean, group in zip(means, groups, strict=True)
    ]


def format_target(metric: str, target: float) -> str:
    return format_score(metric, target).replace(".0%", "%")


def format_seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"


def percent(fraction: float) -> str:
    """Three significant digits, so that 0.1 % and 0.01 % can be told apart."""
    return f"{100 * fraction:.3g}%"
