"""Tables: rows as a person reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

# Wide enough for every table of the command line.
PIPE_WIDTH = 180
TIGHT: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "show_edge": False}
"""A table without a frame."""


def make_console() -> Console:
    """As wide as the terminal; a file or pipe has no width, and a table must not be folded there."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def say(console: Console, line: str) -> None:
    """A line as it is: nothing in it is rich's, and it is not folded."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def format_table(
    columns: Mapping[str, str],
    rows: Iterable[Mapping[str, Any]],
    *,
    texts: int = 1,
    section: str | None = None,
    **looks: Any,
) -> Table:
    """A line per row, in which None is blank.

    `columns` are headings, and how a row is formatted under each; the first `texts` of them hold text. A line is drawn
    where the value of `section` changes.
    """
    table = Table(**looks)
    for index, heading in enumerate(columns):
        table.add_column(heading, justify="left" if index < texts else "right")
    before = None
    for row in rows:
        if section is not None and before not in (None, row[section]):
            table.add_section()
        before = row[section] if section is not None else None
        shown = {name: Blank() if value is None else value for name, value in row.items()}
        table.add_row(*(column.format_map(shown) for column in columns.values()))
    return table


class Blank:
    """What is not there, in any format."""

    def __format__(self, how: str) -> str:
        return ""


def show_plan(measurements: Sequence[str], where: str) -> None:
    """Print what would be measured, under its number; `where` is on what."""
    print(f"{len(measurements)} to measure, on {where}:")
    for line in measurements:
        print(f"  {line}")
