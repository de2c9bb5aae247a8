"""Plots: loss against steps and against what was sent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from thinwire.observe.metrics import Record
from thinwire.observe.results import Row

# Okabe and Ito's colours, told apart by colour-blind readers too.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442")
SMOOTHED_OVER = 15


def plot_comparison(path: Path, records: Sequence[Record], rows: Sequence[Row], title: str) -> None:
    """Two panels with one curve per method: loss against steps, loss against MB sent."""
    # Figure without pyplot: no display, no global state.
    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for i, row in enumerate(rows):
        steps = [r for r in records if r["run"] == row.method and r["event"] == "step"]
        label = f"{row.method} (test accuracy {row.score:.1%})"
        draw_run(by_step, by_bytes, steps, label, COLOURS[i % len(COLOURS)])
    figure.suptitle(title)
    by_step.set(xlabel="steps", ylabel="training loss (mean over workers)", yscale="log")
    by_bytes.set(xlabel="MB sent by each worker so far", xscale="log")
    for axis in (by_step.yaxis, by_bytes.xaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axes in (by_step, by_bytes):
        axes.legend(frameon=False, loc="upper right" if axes is by_step else "lower left")
        axes.grid(True, which="major", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def draw_run(
    by_step: Axes, by_bytes: Axes, steps: Sequence[Record], label: str, colour: str
) -> None:
    """The running mean as a line, the single steps faint behind it, and a dot where the run ended."""
    losses = [math.nan if r["loss"] is None else r["loss"] for r in steps]
    smooth = running_mean(losses, SMOOTHED_OVER)
    numbers = [r["step"] for r in steps]
    sent = list(itertools.accumulate(r["wire_bytes"] / 1e6 for r in steps))
    by_step.plot(numbers, losses, color=colour, alpha=0.15, linewidth=0.7)
    by_step.plot(numbers, smooth, color=colour, linewidth=1.8, label=label)
    by_bytes.plot(sent, smooth, color=colour, linewidth=1.8, label=f"{sent[-1]:.3g} MB in all")
    by_bytes.plot(sent[-1:], smooth[-1:], "o", color=colour, markersize=5)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of the last `width` values at each point."""
    means = []
    for i in range(len(values)):
        window = values[max(0, i + 1 - width) : i + 1]
        means.append(sum(window) / len(window))
    return means
