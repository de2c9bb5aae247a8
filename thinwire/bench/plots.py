"""Plots of the step benchmark. They read rows and nothing else: `python -m thinwire.bench.plots FOLDER`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thinwire.bench.anchors import RATE_FREE
from thinwire.bench.rows import Row, rate_bits, read_rows, select_rows
from thinwire.errors import UsageError

DASHES = ("-", "--", "-.", ":")
PARTS = {
    "compute": "#4c78a8",
    "encode": "#f58518",
    "decode": "#e45756",
    "exposed communication": "#bab0ac",
}


def draw_plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw what the rows have material for; return the files."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UsageError(
            "plots need the package 'matplotlib', which is not installed; the rows are complete without them"
        ) from None
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    plots: dict[str, Callable[[Any, list[Row]], None]] = {
        "step_time.png": draw_step_time,
        "where_a_step_goes.png": draw_parts,
        "speedup.png": draw_speedup,
    }
    return [
        path
        for name, draw in plots.items()
        if (path := _draw_models(select_rows(rows, lambda row: True), folder / name, draw))
    ]


def draw_step_time(axes: Any, rows: list[Row]) -> None:
    """Step time against bandwidth, one line per method; what sends nothing is a level line."""
    shaped = _base([row for row in rows if rate_bits(row) is not None])
    for method in _methods(shaped):
        points = sorted((_bits(row), row["ms"]) for row in shaped if row["method"] == method)
        axes.plot([x / 1e9 for x, _ in points], [ms for _, ms in points], "o-", label=method)
    for row in rows:
        if row["method"] in RATE_FREE and row["workers"] == _most_workers(rows):
            axes.axhline(row["ms"], linestyle=":", color="gray", label=row["method"])
    axes.set(xscale="log", yscale="log", xlabel="Gbit/s of each link", ylabel="ms per step")


def draw_parts(axes: Any, rows: list[Row]) -> None:
    """Where a step goes, one bar per row.

    Compute is the step under no_sync. Encoding and decoding may overlap with it, so they are shown only as far as
    the step is longer than that; the rest of the excess is exposed communication.
    """
    chosen = _base([row for row in rows if row["method"] not in RATE_FREE])
    labels = [f"{row['method']} {row['rate']}" for row in chosen]
    left = [0.0] * len(chosen)
    split = [split_step(row) for row in chosen]
    for part, colour in PARTS.items():
        widths = [parts[part] for parts in split]
        axes.barh(labels, widths, left=left, color=colour, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="ms per step")


def draw_speedup(axes: Any, rows: list[Row]) -> None:
    """Speed-up over one worker (which never communicates) against workers: a colour per method, a dash per rate."""
    chosen = [row for row in rows if row["method"] not in RATE_FREE and row["bucket_mb"] is None]
    methods = _methods(chosen)
    rates = list(dict.fromkeys(row["rate"] for row in chosen))
    for method, rate in dict.fromkeys((row["method"], row["rate"]) for row in chosen):
        points = {1: 1.0}
        for row in chosen:
            if (row["method"], row["rate"]) == (method, rate):
                points.setdefault(row["workers"], row["speedup"])
        counts = sorted(points)
        axes.plot(
            counts,
            [points[count] for count in counts],
            marker="o",
            color=f"C{methods.index(method)}",
            linestyle=DASHES[rates.index(rate) % len(DASHES)],
            label=f"{method} {rate}",
        )
    most = _most_workers(rows)
    axes.plot([1, most], [1, most], ":", color="gray", label="ideal")
    axes.set(xlabel="workers", ylabel="times one worker", ylim=(0, None))


def split_step(row: Row) -> dict[str, float]:
    """A row's step cut into the parts of the bar; they add up to its `ms`."""
    compute = min(row["ms"], row["no_sync_ms"])
    excess = row["ms"] - compute
    encode = min(excess, row["encode_ms"] or 0.0)
    decode = min(excess - encode, row["decode_ms"] or 0.0)
    return {
        "compute": compute,
        "encode": encode,
        "decode": decode,
        "exposed communication": excess - encode - decode,
    }


def _draw_models(
    rows: list[Row], path: Path, draw: Callable[[Any, list[Row]], None]
) -> Path | None:
    from matplotlib import pyplot

    models = list(dict.fromkeys(row["model"] for row in rows))
    if not models:
        return None
    figure, grid = pyplot.subplots(
        1, len(models), figsize=(6 * len(models), 4.5), squeeze=False, layout="constrained"
    )
    for axes, model in zip(grid[0], models, strict=True):
        draw(axes, [row for row in rows if row["model"] == model])
        axes.set_title(model)
        handles, labels = axes.get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True))
        axes.legend(named.values(), named.keys(), fontsize="x-small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _base(rows: list[Row]) -> list[Row]:
    """Without the sweeps: most workers, DDP's own buckets, and one setting per method and rate."""
    most = _most_workers(rows)
    kept = [row for row in rows if row["workers"] == most and row["bucket_mb"] is None]
    return list({(row["method"], row["rate"]): row for row in reversed(kept)}.values())[::-1]


def _most_workers(rows: list[Row]) -> int:
    return max((row["workers"] for row in rows), default=1)


def _methods(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def _bits(row: Row) -> int:
    bits = rate_bits(row)
    assert bits is not None
    return bits


if __name__ == "__main__":
    source = Path(sys.argv[1])
    for drawn in draw_plots(read_rows(source), source if source.is_dir() else source.parent):
        print(drawn)
