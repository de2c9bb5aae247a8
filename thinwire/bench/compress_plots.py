"""The plot of the compression benchmark. It reads rows and nothing else: `python -m thinwire.bench.compress_plots FOLDER`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.bench.compress_rows import CompressRow, read_rows
from thinwire.tools.books import OK
from thinwire.tools.figures import add_legend, make_figure, tidy
from thinwire.tools.palette import COLOURS, find_style

SIDES = {
    "tensor by tensor in torch": {"torch-row-topk": "per row", "torch-topk": "global"},
    "thinwire": {"adtopk": "per row", "topk": "global"},
}
"""The two panels, and which names select per row and which globally."""

LIKE = {"per row": "adtopk", "global": "topk"}
"""Whose colour each way of selecting has."""
MARKERS = ("o", "s", "^", "v", "D")


def draw_selection(rows: Sequence[CompressRow], folder: Path) -> Path | None:
    """Encode time against tensor size, per row and global, one panel for torch and one for thinwire.

    None if no tensor was measured by itself.
    """
    measured = [
        row for row in rows if row.tensor is not None and row.status == OK and row.work == "encode"
    ]
    if not measured:
        return None
    figure = make_figure(12, 4.5)
    grid = figure.subplots(1, len(SIDES), sharey=True)
    densities = sorted({row.density or 0.0 for row in measured}, reverse=True)
    for axes, (title, names) in zip(grid, SIDES.items(), strict=True):
        for name, how in names.items():
            for density, marker in zip(densities, MARKERS, strict=False):
                points = find_points(measured, name, density)
                label = f"{how}, {100 * density:g} %"
                _scatter(axes, points, label, marker, COLOURS[find_style(LIKE[how])[0]])
        axes.set(xscale="log", yscale="log", xlabel="elements of the tensor", title=title)
        tidy(axes)
    add_legend(figure, list(grid))
    grid[0].set_ylabel("ms for residual, selection and payload")
    hardware = ", ".join(dict.fromkeys(row.hardware for row in measured))
    figure.suptitle(f"Selection per row and over the whole tensor, {hardware}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "selection_time.png"
    figure.savefig(path)
    return path


def find_points(rows: Sequence[CompressRow], name: str, density: float) -> list[tuple[int, float]]:
    """(elements, ms) of every tensor, the smallest first."""
    mine = [row for row in rows if row.name == name and row.density == density]
    return sorted((row.elements, row.ms) for row in mine if row.ms is not None)


def _scatter(
    axes: Any, points: list[tuple[int, float]], label: str, marker: str, colour: str
) -> None:
    axes.plot(
        [elements for elements, _ in points],
        [ms for _, ms in points],
        marker,
        color=colour,
        label=label,
        markersize=5,
        alpha=0.8,
    )


if __name__ == "__main__":
    source = Path(sys.argv[1])
    drawn = draw_selection(read_rows(source), source if source.is_dir() else source.parent)
    print(drawn or "no row measures a tensor by itself")
