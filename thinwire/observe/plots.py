"""Plots: loss and test score against steps, and loss against what was sent."""

from __future__ import annotations

import itertools
import logging
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from thinwire.observe.metrics import Record
from thinwire.observe.results import Row
from thinwire.observe.scores import format_spread, group_seeds, name_metric

# Its cache may remember fonts of an environment that is gone; it finds others, at a warning per glyph.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

# Okabe and Ito's colours, told apart by colour-blind readers too.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442")
LINES = ("-", "--", ":", "-.")
SMOOTHED_OVER = 15
LINES_INSIDE = 8
"""With more curves than this the legend would cover them, and goes under the panels."""


def plot_comparison(path: Path, records: Sequence[Record], rows: Sequence[Row], title: str) -> None:
    """Three panels with one curve per method and density: loss against steps, loss against MB sent, score against steps.

    Several seeds are drawn as their mean, the range between them shaded.
    """
    groups = group_seeds(rows)
    crowded = len(groups) > LINES_INSIDE
    # Figure without pyplot: no display, no global state.
    height = 4.6 + 0.08 * len(groups) * crowded
    figure = Figure(figsize=(15, height), dpi=150, layout="constrained")
    by_step, by_bytes, by_score = figure.subplots(1, 3)
    by_bytes.sharey(by_step)
    losses = steps_by_run(records)
    for i, group in enumerate(groups):
        style: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)],
            "linestyle": LINES[i // len(COLOURS) % 4],
            "linewidth": 1.8,
        }
        label = f"{name_group(group, groups)} ({describe_score(group)})"
        draw_losses(by_step, by_bytes, [losses.get(row.run, []) for row in group], label, style)
        draw_scores(by_score, group, style)
    figure.suptitle(title)
    by_step.set(xlabel="steps", ylabel="training loss (mean over workers)", yscale="log")
    # One worker alone sends nothing, which a logarithm cannot show.
    anything_sent = any(row.wire_bytes_per_step > 0 for row in rows)
    scale = "log" if anything_sent else "linear"
    by_bytes.set(xlabel="MB sent by each worker so far", xscale=scale)
    by_score.set(xlabel="steps", ylabel=f"test {name_metric(rows[0].metric)}")
    for axis in (by_step.yaxis, by_bytes.xaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if crowded:
        handles, labels = by_step.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize="x-small"
        )
    for axes in (by_step, by_bytes, by_score):
        if not crowded and axes is not by_score:
            axes.legend(frameon=False, loc="upper right" if axes is by_step else "lower left")
        axes.grid(True, which="major", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def steps_by_run(records: Sequence[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        if record["event"] == "step":
            found.setdefault(record["run"], []).append(record)
    return found


def name_group(group: Sequence[Row], groups: Sequence[Sequence[Row]]) -> str:
    """The method, with its density if it is there with several."""
    first = group[0]
    twice = sum(other[0].method == first.method for other in groups) > 1
    return f"{first.method} {100 * (first.asked_density or 1):g}%" if twice else first.method


def describe_score(group: Sequence[Row]) -> str:
    metric = group[0].metric
    return f"test {name_metric(metric)} {format_spread(metric, [row.score for row in group])}"


def draw_losses(
    by_step: Axes,
    by_bytes: Axes,
    runs: Sequence[Sequence[Record]],
    label: str,
    style: dict[str, Any],
) -> None:
    """The running mean as a line, and a dot where the run ended; single steps or other seeds faint behind it."""
    runs = [run for run in runs if run]
    if not runs:
        return
    shortest = min(len(run) for run in runs)
    raw = [[math.nan if r["loss"] is None else r["loss"] for r in run[:shortest]] for run in runs]
    smooth = [running_mean(losses, SMOOTHED_OVER) for losses in raw]
    mean = [statistics.fmean(values) for values in zip(*smooth, strict=True)]
    numbers = [r["step"] for r in runs[0][:shortest]]
    sent = list(itertools.accumulate(r["wire_bytes"] / 1e6 for r in runs[0][:shortest]))
    faint = {"color": style["color"], "alpha": 0.15}
    if len(runs) == 1:
        by_step.plot(numbers, raw[0], linewidth=0.7, **faint)
    else:
        columns = list(zip(*smooth, strict=True))
        by_step.fill_between(numbers, list(map(min, columns)), list(map(max, columns)), **faint)
    by_step.plot(numbers, mean, **style, label=label)
    by_bytes.plot(sent, mean, **style, label=f"{sent[-1]:.3g} MB in all")
    by_bytes.plot(sent[-1:], mean[-1:], "o", color=style["color"], markersize=5)


def draw_scores(axes: Axes, group: Sequence[Row], style: dict[str, Any]) -> None:
    """The mean of the seeds at every test, the range between them shaded."""
    tests = [row.tests for row in group]
    rounds = list(zip(*tests, strict=False))
    steps = [one[0][0] for one in rounds]
    scores = [[score for _, score in one] for one in rounds]
    axes.plot(steps, [statistics.fmean(values) for values in scores], **style)
    if len(group) > 1:
        low, high = [min(values) for values in scores], [max(values) for values in scores]
        axes.fill_between(steps, low, high, color=style["color"], alpha=0.15)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of the last `width` values at each point."""
    means = []
    for i in range(len(values)):
        window = values[max(0, i + 1 - width) : i + 1]
        means.append(sum(window) / len(window))
    return means
