"""Report: the learning evidence as a table with verdicts, and as a picture.

python benchmarks/learning/report.py benchmarks/results/learning/rows.json --plot docs/learning.png
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from learning.store import Row, read_rows  # noqa: E402
from thinwire.tools.scores import SHARES, format_score, name_metric  # noqa: E402

LIMITS = {0.001: 0.5}
"""Points of a share, or percent of another metric, that a method may lie behind dense at a density;"""
LIMIT_OF_SHARES, LIMIT_OF_OTHERS = 0.3, 1.0
"""at any other one."""
HEADER = (
    "task",
    "method",
    "asked",
    "sent",
    "fewer bytes",
    "seeds",
    "score",
    "against dense",
    "verdict",
)


@dataclass(frozen=True)
class Line:
    """A method at a density on a task, over its seeds."""

    rows: Sequence[Row]
    dense: Sequence[Row]

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def unit(self) -> str:
        return "points" if self.first["metric"] in SHARES else "%"

    @property
    def behind(self) -> float:
        """How much worse than dense the mean is, in points of a share or percent of another metric."""
        mean, dense = mean_score(self.rows), mean_score(self.dense)
        worse = dense - mean if self.first["higher_is_better"] else mean - dense
        return 100 * worse if self.unit == "points" else 100 * worse / dense

    @property
    def spread(self) -> float | None:
        """From the worst to the best seed, of dense or of this method, whichever is wider; None with one seed."""
        ranges = [max(scores(rows)) - min(scores(rows)) for rows in (self.rows, self.dense)]
        if min(len(self.rows), len(self.dense)) < 2:
            return None
        wider = 100 * max(ranges)
        return wider if self.unit == "points" else wider / mean_score(self.dense)

    @property
    def limit(self) -> float:
        usual = LIMIT_OF_SHARES if self.unit == "points" else LIMIT_OF_OTHERS
        return LIMITS.get(self.first["asked_density"], usual)

    @property
    def verdict(self) -> str:
        """level: behind dense by no more than the seeds' spread, nor the limit; close: only the limit holds."""
        if self.first["method"] == "dense":
            return ""
        if not math.isfinite(self.behind) or self.behind > self.limit:
            return f"behind (limit {self.limit:g})"
        if self.spread is not None and self.behind > self.spread:
            return "close"
        return "level"

    def cells(self) -> list[str]:
        row = self.first
        asked = "" if row["asked_density"] is None else f"{row['asked_density']:.1%}"
        spread = ""
        if len(self.rows) > 1 and all(map(math.isfinite, scores(self.rows))):
            factor = 100 if self.unit == "points" else 1
            spread = f" ± {factor * statistics.stdev(scores(self.rows)):.2g}"
        dense = row["method"] == "dense"
        against = "" if dense else f"{0.0 - self.behind:+.2f} {self.unit}"
        if not dense and self.spread is not None:
            against += f" (spread {self.spread:.2f})"
        return [
            row["task"],
            row["method"],
            asked,
            "" if dense else f"{row['density']:.2%}",
            "" if dense else f"{row['ratio']:.0f}x",
            str(len(self.rows)),
            f"{show(row['metric'], mean_score(self.rows))}{spread}",
            against,
            self.verdict,
        ]


def scores(rows: Sequence[Row]) -> list[float]:
    """A run that was lost has none."""
    return [math.nan if row["score"] is None else row["score"] for row in rows]


def mean_score(rows: Sequence[Row]) -> float:
    return statistics.fmean(scores(rows))


def show(metric: str, value: float) -> str:
    """With a digit more than usual: differences are small."""
    return f"{value:.2%}" if metric in SHARES else format_score(metric, value)


def group(rows: Sequence[Row]) -> list[Line]:
    """By task, density and method, each against dense on the same task; in the order in which they were planned."""
    groups: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        key = (row["task"], -(row["asked_density"] or 1.0), row["method"])
        groups.setdefault(key, []).append(row)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    ordered = sorted(groups, key=lambda key: (tasks.index(key[0]), key[1]))
    return [Line(groups[key], groups.get((key[0], -1.0, "dense"), ())) for key in ordered]


def lines_with_dense(rows: Sequence[Row]) -> list[Line]:
    """Without dense there is nothing to be level with."""
    return [line for line in group(rows) if line.dense]


def summary_text(rows: Sequence[Row]) -> str:
    """For a terminal."""
    lines = [list(HEADER), *(line.cells() for line in lines_with_dense(rows))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    table = [
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
    notes = sorted(
        {f"{row['task']}: {row['epochs']} epochs {row['data']}".rstrip() for row in rows}
    )
    return "\n".join([*table, *notes, *(f"note: {n}" for n in find_notes(rows))]) + "\n"


def find_notes(rows: Sequence[Row]) -> list[str]:
    return sorted({row["note"] for row in rows if row.get("note")})


def markdown_table(rows: Sequence[Row], task: str) -> str:
    """For docs/learning.md."""
    table = [f"| {' | '.join(HEADER[1:])} |", "|" + "---|" * (len(HEADER) - 1)]
    for line in lines_with_dense(rows):
        if line.first["task"] == task:
            table.append(f"| {' | '.join(line.cells()[1:])} |")
    return "\n".join(table) + "\n"


def committed_table(folder: str, task: str) -> str:
    """The same of the rows in the repository."""
    rows = read_rows(ROOT / "benchmarks" / "results" / folder / "rows.json")
    if not any(row["task"] == task for row in rows):
        return "Not run yet.\n"
    return markdown_table(rows, task)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Score against epoch: a panel per task and density, a curve per method, the range of its seeds shaded."""
    from matplotlib.figure import Figure

    from thinwire.tools.palette import Styles, find_method

    lines = lines_with_dense(rows)
    panels: dict[tuple[str, float], list[Line]] = {}
    for line in lines:
        if line.first["asked_density"] is not None:
            panels.setdefault((line.first["task"], line.first["asked_density"]), []).append(line)
    across = min(2, len(panels)) or 1
    down = -(-len(panels) // across) or 1
    figure = Figure(figsize=(6.5 * across, 4.6 * down), dpi=120, layout="constrained")
    grid = list(figure.subplots(down, across, squeeze=False).flat)
    for empty in grid[len(panels) :]:
        empty.set_visible(False)
    styles = Styles()
    for axes, ((task, density), chosen) in zip(grid, panels.items(), strict=False):
        everywhere = [
            line
            for line in lines
            if line.first["task"] == task and line.first["asked_density"] is None
        ]
        for line in (*everywhere, *chosen):
            method = line.first["method"]
            draw(axes, line, styles.look(find_method(method), method))
        metric = name_metric(chosen[0].first["metric"])
        data = chosen[0].first["data"]
        axes.set(title=f"{task}, {density:.1%}", xlabel="epochs", ylabel=f"test {metric}")
        if data:
            axes.set_title(f"{task} ({data}), {density:.1%}")
        if metric == "perplexity":
            axes.set_yscale("log")
        axes.legend(frameon=False, fontsize="small")
        axes.grid(True, which="major", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def draw(axes, line: Line, look: dict[str, Any]) -> None:
    runs = [
        [(step / row["steps_per_epoch"], score) for step, score in row["tests"]]
        for row in line.rows
    ]
    rounds = list(zip(*runs, strict=False))
    epochs = [one[0][0] for one in rounds]
    values = [[math.nan if score is None else score for _, score in one] for one in rounds]
    label = f"{line.first['method']} {show(line.first['metric'], mean_score(line.rows))}"
    axes.plot(epochs, list(map(statistics.fmean, values)), label=label, **look)
    axes.fill_between(
        epochs, list(map(min, values)), list(map(max, values)), color=look["color"], alpha=0.15
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--plot", type=Path, help="the picture's file")
    options = parser.parse_args()
    rows = read_rows(options.rows)
    print(summary_text(rows), end="")
    if options.plot is not None:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
