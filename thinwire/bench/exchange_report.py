"""What `thinwire bench exchange` shows and writes: tables, files of rows, words against ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from thinwire.tools.figures import add_legend, make_figure, tidy
from thinwire.tools.files import format_csv, write_text
from thinwire.tools.palette import Styles, find_method
from thinwire.tools.provenance import describe_origin
from thinwire.tools.tables import format_table, make_console

Row = dict[str, Any]

WORDS = {
    "method": "{method}",
    "ranks": "{ranks:,}",
    "count": "{count:,}",
    "k": "{k:,}",
    "words/k": "{words_per_k:.2f}",
    "x P/(P-1)": "{flat:.2f}",
    "busiest": "{words:,.0f}{outside}",
    "formula": "{formula}",
    "allows": "{formula_words:,.0f}",
    "padding": "{padding:.1%}",
    "control": "{control:.1%}",
    "contraction": "{contraction:.2f}",
}
TIMES = {
    "method": "{method}",
    "size": "{size:,}",
    "count": "{count:,}",
    "type": "{type}",
    "time us": "{time_us:,.0f}",
    "algbw": "{algbw:.3f}",
    "busbw": "{busbw:.3f}",
    "wrong": "{wrong}",
    "wire bytes": "{wire_bytes:,.0f}",
    "ratio": "{ratio:.1f}",
    "encode us": "{encode_us:,.0f}",
    "exchange us": "{exchange_us:,.0f}",
    "decode us": "{decode_us:,.0f}",
    "error": "{error:.3f}",
}


def words_table(rows: Sequence[Row]) -> Table:
    """Words per rank and step beside each method's formula."""
    marked = [{**row, "outside": "" if row["inside"] else " !"} for row in rows]
    return format_table(WORDS, marked, title="words of 4 bytes per rank and step; payload only")


def time_table(rows: Sequence[Row]) -> Table:
    """The columns of nccl-tests, then what sparse exchanges add."""
    title = "times are medians; bandwidths in GB/s of the dense gradient"
    return format_table(TIMES, rows, title=title)


def show_rows(table: Table, rows: Sequence[Row], out: Path | None, *, plot: bool = False) -> None:
    """Print the table, and write the rows if there is a folder for them. Rows come to the first rank only."""
    console = make_console()
    if rows:
        console.print(table)
    if rows and out is not None:
        for path in write_rows(rows, out, plot=plot):
            console.print(f"wrote {path}")


def write_rows(rows: Sequence[Row], folder: Path, *, plot: bool) -> list[Path]:
    """rows.csv, rows.json with what they were measured on, and words.png where there is something to draw."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "rows.csv", folder / "rows.json"]
    write_text(written[0], format_csv(list(rows[0]), rows))
    write_text(written[1], json.dumps({"origin": describe_origin(), "rows": list(rows)}, indent=1))
    if plot:
        written.append(draw_words(rows, folder / "words.png"))
    return written


def draw_words(rows: Sequence[Row], path: Path) -> Path:
    """Words per entry kept against the number of ranks, one line per method, log-log."""
    figure = make_figure(9, 5)
    axes = figure.subplots()
    styles = Styles()
    largest = max(row["count"] for row in rows)
    for name in dict.fromkeys(row["method"] for row in rows):
        points = sorted(
            (row["ranks"], row["words_per_k"])
            for row in rows
            if row["method"] == name and row["count"] == largest
        )
        look = styles.look(find_method(name), name)
        axes.plot(
            [p for p, _ in points], [words for _, words in points], marker="o", label=name, **look
        )
    axes.set(
        xscale="log", yscale="log", xlabel="ranks", ylabel="words per rank, step and entry kept"
    )
    tidy(axes)
    add_legend(figure, [axes])
    figure.savefig(path)
    return path
