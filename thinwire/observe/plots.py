"""Plots: loss against steps and against what was sent."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from thinwire.observe.metrics import Record
from thinwire.observe.results import Row

# Its cache may remember fonts of an environment that is gone; it finds others, at a warning per glyph.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

# Okabe and Ito's colours, told apart by colour-blind readers too.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442")
LINES = ("-", "--", ":", "-.")
SMOOTHED_OVER = 15
LINES_INSIDE = 8
"""With more curves than this the legend would cover them, and goes under the panels."""


def plot_comparison(path: Path, records: Sequence[Record], rows: Sequence[Row], title: str) -> None:
    """Two panels with one curve per method: loss against steps, loss against MB sent."""
    # Figure without pyplot: no display, no global state.
    crowded = len(rows) > LINES_INSIDE
    figure = Figure(figsize=(11, 4.6 + 0.08 * len(rows) * crowded), dpi=150, layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for i, row in enumerate(rows):
        steps = [r for r in records if r["run"] == row.method and r["event"] == "step"]
        label = f"{row.method} (test accuracy {row.score:.1%})"
        style: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)],
            "linestyle": LINES[i // len(COLOURS) % 4],
        }
        draw_run(by_step, by_bytes, steps, label, style)
    figure.suptitle(title)
    by_step.set(xlabel="steps", ylabel="training loss (mean over workers)", yscale="log")
    by_bytes.set(xlabel="MB sent by each worker so far", xscale="log")
    for axis in (by_step.yaxis, by_bytes.xaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if crowded:
        handles, labels = by_step.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize="x-small"
        )
    for axes in (by_step, by_bytes):
        if not crowded:
            axes.legend(frameon=False, loc="upper right" if axes is by_step else "lower left")
        axes.grid(True, which="major", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def draw_run(
    by_step: Axes,
    by_bytes: Axes,
    steps: Sequence[Record],
    label: str,
    style: dict[str, Any],
) -> None:
    """The running mean as a line, the single steps faint behind it, and a dot where the run ended."""
    losses = [math.nan if r["loss"] is None else r["loss"] for r in steps]
    smooth = running_mean(losses, SMOOTHED_OVER)
    numbers = [r["step"] for r in steps]
    sent = list(itertools.accumulate(r["wire_bytes"] / 1e6 for r in steps))
    by_step.plot(numbers, losses, color=style["color"], alpha=0.15, linewidth=0.7)
    by_step.plot(numbers, smooth, **style, linewidth=1.8, label=label)
    by_bytes.plot(sent, smooth, **style, linewidth=1.8, label=f"{sent[-1]:.3g} MB in all")
    by_bytes.plot(sent[-1:], smooth[-1:], "o", color=style["color"], markersize=5)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of the last `width` values at each point."""
    means = []
    for i in range(len(values)):
        window = values[max(0, i + 1 - width) : i + 1]
        means.append(sum(window) / len(window))
    return means
