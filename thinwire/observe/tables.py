"""Tables: results as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from thinwire.observe.results import Row

# Wide enough for every table of the command line.
PIPE_WIDTH = 180
COLUMNS = (
    "method",
    "density\nasked",
    "density\nsent",
    "test\naccuracy",
    "MB/step\ndense",
    "MB/step\nsent",
    "ratio",
    "ms/step",
    "replicas\nidentical",
)


def make_console() -> Console:
    """As wide as the terminal; a file or pipe has no width, and a table must not be folded there."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def results_table(rows: Sequence[Row], title: str) -> Table:
    """One line per method; MB are 10^6 bytes that one worker sends."""
    table = Table(
        *COLUMNS,
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
    for row in rows:
        table.add_row(*cells(row))
    return table


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.method,
        "-" if row.asked_density is None else percent(row.asked_density),
        percent(row.density),
        f"{row.score:.1%}",
        f"{row.dense_bytes_per_step / 1e6:.4f}",
        f"{row.wire_bytes_per_step / 1e6:.4f}",
        f"{row.ratio:.1f}x",
        f"{row.ms_per_step:.1f}",
        "yes" if row.replicas_identical else "NO",
    )


def percent(fraction: float) -> str:
    """Three significant digits, so that 0.1 % and 0.01 % can be told apart."""
    return f"{100 * fraction:.3g}%"
