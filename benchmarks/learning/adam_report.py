"""The study of Adam as a table and as a picture: loss against bits.

python benchmarks/learning/adam_report.py benchmarks/results/adam/rows.json --plot docs/adam.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

NAMES = {
    "dense": "dense AdamW",
    "int8": "`Quantized(bits=8)`",
    "int8-stochastic": "the same, rounded stochastically",
    "int8-no-memory": "`Quantized(bits=8)`, no memory",
    "int4": "`Quantized(bits=4)`",
    "int4-stochastic": "the same, rounded stochastically",
    "int4-sums16": "`Quantized(bits=4)`, sums in bfloat16",
    "int4-no-memory": "`Quantized(bits=4)`, no memory",
    "bit1": "`Quantized(bits=1)`, AdamW behind it",
    "topk1": "top-k 1 %, AdamW behind it",
    "topk1-adam": "`AdamScale`, top-k 1 %, frozen",
    "bit1-adam": "`AdamScale`, 1 bit, frozen",
    "bit1-adam-refresh": "`AdamScale`, 1 bit, refreshed",
    "bit1-adam-refresh-block32": "the same, blocks of 32",
    "bit1-adam-refresh-free": "the same, without the limit",
    "bit1-adam-refresh-sums2": "`AdamScale`, 1 bit, sums in 2, refreshed",
    "bit1-adam-refresh-sums4": "`AdamScale`, 1 bit, sums in 4, refreshed",
    "bit1-adam-refresh-sums8": "`AdamScale`, 1 bit, sums in 8, refreshed",
}
"""In the order of the table; a method that is missing here comes last under its own name."""
USUAL_START = 5
"""Per cent of dense steps at the beginning; others are named."""
LEFT_OUT = ("bit1-adam-refresh-block32",)
"""In the picture it would cover its neighbour."""
HIGHEST = 1.45
"""Losses above it are left out of the picture."""


class Line(NamedTuple):
    """One method after one dense start, at the rate that suits it best."""

    method: str
    start: int
    lr: float
    losses: tuple[float, ...]
    bits: float

    @property
    def mean(self) -> float:
        return statistics.mean(self.losses)

    @property
    def spread(self) -> float:
        return max(self.losses) - min(self.losses)

    @property
    def name(self) -> str:
        later = "" if self.start == USUAL_START else f", {self.start} % dense"
        return NAMES.get(self.method, self.method) + later


def read_lines(rows: Sequence[dict[str, Any]]) -> list[Line]:
    """Of every method the rate with the lowest mean loss; every seed counts once."""
    found: dict[tuple[str, int], dict[float, list[dict[str, Any]]]] = {}
    for row in rows:
        by_rate = found.setdefault((row["method"], row["start"]), {})
        by_rate.setdefault(row["lr"], []).append(row)
    lines = []
    for (method, start), by_rate in found.items():
        candidates = [
            Line(method, start, lr, tuple(row["valid_loss"] for row in group), group[0]["bits"])
            for lr, group in by_rate.items()
        ]
        lines.append(min(candidates, key=lambda line: line.mean))
    places = {name: place for place, name in enumerate(NAMES)}
    return sorted(lines, key=lambda line: (places.get(line.method, len(places)), line.start))


def make_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = read_lines(rows)
    dense = next(line for line in lines if line.method == "dense")
    table = [
        "| method | bits per parameter | seeds | validation loss, nats per byte | against dense |",
        "|---|---|---|---|---|",
    ]
    for line in lines:
        spread = f" (seeds differ by {line.spread:.4f})" if len(line.losses) > 1 else ""
        against = "" if line is dense else f"{100 * (line.mean / dense.mean - 1):+.1f} %"
        table.append(
            f"| {line.name} | {line.bits:.3g} | {len(line.losses)} "
            f"| {line.mean:.4f}{spread} | {against} |"
        )
    return "\n".join(table) + "\n"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Loss against bits, a point per method; error bars are the lowest and the highest seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row["method"] not in LEFT_OUT]
    lines = [line for line in read_lines(shown) if line.mean < HIGHEST]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    dense = next(line for line in lines if line.method == "dense")
    axes.axhline(dense.mean, color="0.6", linewidth=1, zorder=0)
    for line in lines:
        below, above = line.mean - min(line.losses), max(line.losses) - line.mean
        axes.errorbar(line.bits, line.mean, yerr=[[below], [above]], fmt="o", capsize=3, color="C0")
        axes.annotate(
            line.name.replace("`", ""),
            (line.bits, line.mean),
            xytext=(6, 4),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    axes.set_xlim(1.4, 90)
    axes.set_xlabel("bits per parameter and step")
    axes.set_ylabel("validation loss, nats per byte")
    axes.set_title("Byte-level GPT, 3.3 M parameters, 8 workers, 1 500 steps", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rows = json.loads(options.rows.read_text())
    print(make_table(rows))
    if options.plot is not None:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
