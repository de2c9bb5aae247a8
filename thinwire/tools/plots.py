"""Plots: loss and test score against steps, and loss against what was sent."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.observe import DimensionStats
from thinwire.tools.figures import add_legend, make_figure, tidy
from thinwire.tools.metrics import Record
from thinwire.tools.palette import Styles
from thinwire.tools.results import Row, group_seeds
from thinwire.tools.scores import SHARES, format_spread, name_metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHED_OVER = 15


def plot_comparison(
    path: Path, records: Sequence[Record], rows: Sequence[Row], title: str, *, timed: bool = False
) -> None:
    """Three panels with one curve per method and density: loss against steps, loss against MB sent, score against steps.

    If they were `timed` on links that count, a fourth shows loss against seconds, and scores are drawn against seconds too.
    Several seeds are drawn as their mean, the range between them shaded.
    """
    groups = group_seeds(rows)
    shape, width, height = ((2, 2), 12, 8.4) if timed else ((1, 3), 15, 4.8)
    figure = make_figure(width, height + 0.08 * len(groups), dpi=150)
    by_step, by_bytes, *by_seconds, by_score = figure.subplots(*shape).flat
    for axes in (by_bytes, *by_seconds):
        axes.sharey(by_step)
    losses = steps_by_run(records)
    styles = Styles()
    for group in groups:
        name = name_group(group, groups)
        style = {**styles.look(group[0].method, name), "linewidth": 1.8}
        label = f"{name} ({describe_score(group)})"
        draw_losses(by_step, by_bytes, [losses.get(row.run, []) for row in group], label, style)
        for axes in by_seconds:
            draw_seconds(axes, losses.get(group[0].run, []), style)
        draw_scores(by_score, group, style, losses if timed else {})
    figure.suptitle(title)
    by_step.set(xlabel="steps", ylabel="training loss (mean over workers)", yscale="log")
    # One worker alone sends nothing, which a logarithm cannot show.
    anything_sent = any(row.wire_bytes_per_step > 0 for row in rows)
    scale = "log" if anything_sent else "linear"
    by_bytes.set(xlabel="MB sent by each worker so far", xscale=scale)
    seconds = "seconds in training steps"
    for axes in by_seconds:
        axes.set(xlabel=seconds, ylabel=by_step.get_ylabel())
    by_score.set(xlabel=seconds if timed else "steps", ylabel=f"test {name_metric(rows[0].metric)}")
    for axes in (by_step, by_bytes, *by_seconds, by_score):
        tidy(axes)
    if rows[0].metric in SHARES:
        by_score.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    add_legend(figure, [by_step], below=True)
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
    by_step.plot(numbers, mean, **style, label=f"{label}, {sent[-1]:.3g} MB sent")
    by_bytes.plot(sent, mean, **style)
    by_bytes.plot(sent[-1:], mean[-1:], "o", color=style["color"], markersize=5)


def add_up_seconds(run: Sequence[Record]) -> list[float]:
    """When every step of a run ended, counting only the time in steps."""
    return list(itertools.accumulate((record.get("ms") or 0) / 1e3 for record in run))


def draw_seconds(axes: Axes, run: Sequence[Record], style: dict[str, Any]) -> None:
    """The running mean of one seed's loss against its seconds, and a dot where the run ended."""
    losses = [math.nan if record["loss"] is None else record["loss"] for record in run]
    smooth, seconds = running_mean(losses, SMOOTHED_OVER), add_up_seconds(run)
    axes.plot(seconds, smooth, **style)
    axes.plot(seconds[-1:], smooth[-1:], "o", color=style["color"], markersize=5)


def draw_scores(
    axes: Axes,
    group: Sequence[Row],
    style: dict[str, Any],
    timed: Mapping[str, Sequence[Record]],
) -> None:
    """The mean of the seeds at every test, the range between them shaded; against the seconds of the first seed if it was timed."""
    tests = [row.tests for row in group]
    rounds = list(zip(*tests, strict=False))
    steps = [one[0][0] for one in rounds]
    if run := timed.get(group[0].run):
        ended = dict(zip((r["step"] for r in run), add_up_seconds(run), strict=True))
        steps = [ended.get(step, math.nan) for step in steps]
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


def plot_dimensions(
    history: Sequence[Mapping[str, DimensionStats]], path: str | Path, *, top: int = 6
) -> None:
    """Share of rows that get nothing against steps, per layer, under global and under all-dimension top-k."""
    names = sorted(
        history[0],
        key=lambda name: -sum(stats[name].empty_global / stats[name].rows for stats in history),
    )[:top]
    figure = make_figure(11, 4)
    panels = figure.subplots(1, 2, sharey=True)
    kinds = {"global top-k": "empty_global", "all-dimension top-k": "empty_all_dimension"}
    for panel, (title, counted) in zip(panels, kinds.items(), strict=True):
        for name in names:
            steps = [stats[name].step for stats in history]
            share = [getattr(stats[name], counted) / stats[name].rows for stats in history]
            panel.plot(steps, share, label=name)
        panel.set(title=title, xlabel="step")
    panels[0].set_ylabel("share of rows that send nothing")
    panels[1].legend(fontsize="small")
    figure.savefig(path)
