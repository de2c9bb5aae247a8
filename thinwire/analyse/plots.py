"""The picture of `thinwire analyse convergence`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from thinwire.tools.figures import add_legend, make_figure, tidy
from thinwire.tools.palette import Styles, find_method
from thinwire.tools.scores import name_metric


def plot_convergence(path: Path, runs: Sequence[dict[str, Any]], title: str) -> None:
    """Three panels against epochs, one curve per run: xi, share of rows without an entry, test score."""
    figure = make_figure(13, 4, dpi=110)
    by_xi, by_rows, by_score = figure.subplots(1, 3)
    styles = Styles()
    for run in runs:
        look = styles.look(find_method(run["run"]), run["run"])
        epochs = [look["epoch"] for look in run["epochs"]]
        shares = [look["empty_as_sent"] / max(1, look["rows"]) for look in run["epochs"]]
        for axes, values in (
            (by_xi, [look["xi"] for look in run["epochs"]]),
            (by_rows, shares),
            (by_score, [look["score"] for look in run["epochs"]]),
        ):
            axes.plot(epochs, values, marker="o", markersize=3, label=run["run"], **look)
    figure.suptitle(title)
    by_xi.set(ylabel="xi (mean over layers)")
    by_rows.set(ylabel="share of rows of which worker 0 sends nothing")
    by_score.set(ylabel=f"test {name_metric(runs[0]['metric'])}")
    for axes in (by_xi, by_rows, by_score):
        axes.set(xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        tidy(axes)
    for axes in (by_xi, by_rows):
        axes.set_ylim(bottom=0)
    add_legend(figure, [by_xi], below=True)
    figure.savefig(path)
