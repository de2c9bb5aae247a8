"""Plots of the step benchmark. They read rows and nothing else: `python -m thinwire.bench.plots FOLDER`.

Every point was measured, and the bar or band around it holds the steps from the 20th to the 80th percentile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thinwire.bench.rows import Row, read_rows, select_rows
from thinwire.report.step_rows import (
    BASELINES,
    SILENT,
    by_setup,
    current_rows,
    find_baseline,
    find_rate,
    name_rate,
    name_row,
)
from thinwire.tools.figures import add_legend, make_figure, tidy
from thinwire.tools.palette import Styles
from thinwire.tools.step_parts import PARTS, split_step

MARKERS = "osD^v"
"""One per dash: methods that share a colour differ in both."""
PANELS_ACROSS = 3
Draw = Callable[[Any, list[Row], Styles], None]


def draw_plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw what the rows have material for; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    measured = select_rows(current_rows(rows), lambda row: True)
    plain = [row for row in measured if row["bucket_mb"] is None]
    most = [row for row in plain if row["workers"] == _most_workers(plain, row["model"])]
    shaped = any(find_rate(row) is not None for row in most)
    drawn = [
        _draw(most, folder / "step_time.png", draw_rates if shaped else draw_methods),
        _draw(_training(most), folder / "where_a_step_goes.png", draw_parts, by_link=True),
    ]
    if len({row["workers"] for row in plain}) > 1:
        drawn.append(_draw(_training(plain), folder / "speedup.png", draw_speedup, by_link=True))
    return [path for path in drawn if path is not None]


def draw_rates(axes: Any, rows: list[Row], styles: Styles) -> None:
    """Step time against bandwidth, one line per method; what sends nothing is a level line."""
    shaped = [row for row in rows if find_rate(row) is not None]
    for name, points in _lines(shaped).items():
        points.sort(key=lambda row: find_rate(row) or 0)
        look = _look(styles, points[0])
        x = [(find_rate(row) or 0) / 1e9 for row in points]
        axes.plot(x, [row["ms"] for row in points], markersize=4, label=name, **look)
        low, high = ([row[key] for row in points] for key in ("ms_p20", "ms_p80"))
        axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
    for row in rows:
        if row["method"] in SILENT:
            axes.axhline(
                row["ms"], label=row["method"], **styles.look(row["method"], row["method"])
            )
    axes.set(xscale="log", yscale="log", xlabel="rate of each link", ylabel="ms per step")
    tidy(axes)
    rates = sorted({(find_rate(row) or 0, row["rate"]) for row in shaped})
    axes.set_xticks([bits / 1e9 for bits, _ in rates], [name_rate(rate) for _, rate in rates])
    axes.minorticks_off()


def draw_methods(axes: Any, rows: list[Row], styles: Styles) -> None:
    """Step time of every method, where there is but one link."""
    chosen = sorted(rows, key=lambda row: row["ms"])
    for row in chosen:
        look = styles.look(row["method"], name_row(row))
        bar = [[row["ms"] - row["ms_p20"]], [row["ms_p80"] - row["ms"]]]
        axes.errorbar(row["ms"], name_row(row), xerr=bar, fmt="o", capsize=3, color=look["color"])
    axes.invert_yaxis()
    axes.set(xlabel="ms per step", xlim=(0, None))
    tidy(axes)


def draw_parts(axes: Any, rows: list[Row], styles: Styles) -> None:
    """Where a step goes on one link, one bar per row.

    Compute is the step without communication. Encoding and decoding may overlap with it: they are shown only as far as the
    step is longer. What is left of the excess is exposed communication.
    """
    chosen = sorted(rows, key=lambda row: row["ms"])
    labels = [name_row(row) for row in chosen]
    alone = {
        id(row): base.ms
        for group in by_setup(rows)
        if (base := find_baseline(group)) is not None
        for row in group
    }
    split = [split_step(row, alone[id(row)]) for row in chosen]
    left = [0.0] * len(chosen)
    for part, colour in PARTS.items():
        widths = [parts[part] for parts in split]
        axes.barh(labels, widths, left=left, color=colour, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    low = [max(0.0, row["ms"] - row["ms_p20"]) for row in chosen]
    high = [max(0.0, row["ms_p80"] - row["ms"]) for row in chosen]
    axes.errorbar(left, labels, xerr=[low, high], fmt="none", ecolor="#1b1f24", capsize=2)
    axes.invert_yaxis()
    axes.set(xlabel="ms per step", xlim=(0, None))
    tidy(axes)
    axes.grid(False, axis="y")


def draw_speedup(axes: Any, rows: list[Row], styles: Styles) -> None:
    """Times one worker that never communicates, against workers, on one link."""
    alone = {
        row["workers"]: base.ms
        for group in by_setup(rows)
        if (base := find_baseline(group)) is not None
        for row in group
    }
    for name, points in _lines(rows).items():
        points.sort(key=lambda row: row["workers"])
        gain, least, most = (
            [row["workers"] * alone[row["workers"]] / row[key] for row in points]
            for key in ("ms", "ms_p80", "ms_p20")
        )
        spread = [
            [max(0.0, a - b) for a, b in zip(gain, least, strict=True)],
            [max(0.0, b - a) for a, b in zip(gain, most, strict=True)],
        ]
        look = _look(styles, points[0])
        counts = [row["workers"] for row in points]
        axes.errorbar(counts, gain, spread, capsize=2, markersize=4, label=name, **look)
    counted = sorted({row["workers"] for row in rows})
    axes.plot(counted, counted, color="#c9ced4", linewidth=4, zorder=0, label="ideal")
    axes.set(xlabel="workers", ylabel="times one worker", ylim=(0, None))
    axes.set_xticks(counted, [str(count) for count in counted])
    tidy(axes)


def _draw(rows: list[Row], path: Path, draw: Draw, *, by_link: bool = False) -> Path | None:
    """A panel per model, or per model and link; colours, dashes and markers are the same in all of them."""
    panels: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: find_rate(row) or float("inf")) if by_link else rows:
        title = f"{_name_panel(row)}, {name_rate(row['rate'])}" if by_link else _name_panel(row)
        panels.setdefault(title, []).append(row)
    if not panels:
        return None
    across = min(PANELS_ACROSS, len(panels))
    down = -(-len(panels) // across)
    figure = make_figure(4.8 * across + 1.5, 4 * down)
    grid = list(figure.subplots(down, across, squeeze=False).flat)
    styles = Styles()
    for axes, (title, chosen) in zip(grid, panels.items(), strict=False):
        draw(axes, chosen, styles)
        axes.set_title(title)
    for empty in grid[len(panels) :]:
        empty.set_axis_off()
    add_legend(figure, grid[: len(panels)])
    figure.savefig(path)
    return path


def _name_panel(row: Row) -> str:
    delayed = f", {row['latency']} of latency" if row["latency"] is not None else ""
    return f"{row['model']}{delayed}"


def _look(styles: Styles, row: Row) -> dict[str, Any]:
    _, dash = styles.find(row["method"], name_row(row))
    return {**styles.look(row["method"], name_row(row)), "marker": MARKERS[dash]}


def _lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of one method and its settings, by the name of their line; plain training comes first."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["method"] not in BASELINES):
        found.setdefault(name_row(row), []).append(row)
    return found


def _training(rows: Sequence[Row]) -> list[Row]:
    """Without what is no way to train."""
    return [row for row in rows if row["method"] not in SILENT]


def _most_workers(rows: Sequence[Row], model: str) -> int:
    return max(row["workers"] for row in rows if row["model"] == model)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    for drawn in draw_plots(read_rows(source), source if source.is_dir() else source.parent):
        print(drawn)
