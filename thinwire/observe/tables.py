"""Tables: results as a person reads them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from thinwire.observe.results import Row
from thinwire.observe.scores import format_spread, group_seeds, name_metric

# Wide enough for every table of the command line.
PIPE_WIDTH = 180


def make_console() -> Console:
    """As wide as the terminal; a file or pipe has no width, and a table must not be folded there."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def results_table(rows: Sequence[Row], title: str) -> Table:
    """One line per method and density, over all seeds; MB are 10^6 bytes that one worker sends."""
    groups = group_seeds(rows)
    seeds = ("seeds",) if any(len(group) > 1 for group in groups) else ()
    table = Table(
        "method",
        "density\nasked",
        "density\nsent",
        f"test\n{name_metric(rows[0].metric)}",
        *seeds,
        "MB/step\ndense",
        "MB/step\nsent",
        "ratio",
        "ms/step",
        "replicas\nidentical",
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        # One space between columns: it fits a terminal of 80.
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for group in groups:
        line = cells(group)
        table.add_row(*line[:4], *((str(len(group)),) if seeds else ()), *line[4:])
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


def percent(fraction: float) -> str:
    """Three significant digits, so that 0.1 % and 0.01 % can be told apart."""
    return f"{100 * fraction:.3g}%"
