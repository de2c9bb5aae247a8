"""Training: verdict, table, curves and layers of runs of `train` and `compare`."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.report.charts import Axis, Chart, Curve, plain, thin
from thinwire.report.html import Html, fold, table, tag
from thinwire.report.page import Section
from thinwire.report.runs import TrainingRun
from thinwire.tools.comparison import SCORE, cells, format_seconds, format_target, percent
from thinwire.tools.metrics import Record
from thinwire.tools.pace import seconds_to
from thinwire.tools.palette import Styles
from thinwire.tools.plots import SMOOTHED_OVER, name_group, running_mean, steps_by_run
from thinwire.tools.results import Row, group_seeds
from thinwire.tools.scores import SHARES, format_score, is_worse, name_metric

AXES = (
    Axis("steps", "steps", "steps"),
    Axis("bytes", "bytes", "MB sent by each worker so far", log=True),
    Axis("seconds", "seconds", "seconds in training steps"),
)


@dataclass(frozen=True)
class Line:
    """One method and density of one run, over all of its seeds."""

    run: str
    name: str
    group: Sequence[Row]
    records: dict[str, list[Record]]
    """Steps by row."""
    target: float | None = None
    """The score whose time is shown."""
    link: str | None = None
    """The rate of the emulated links between the workers, if they were."""

    @property
    def first(self) -> Row:
        return self.group[0]

    @property
    def score(self) -> float:
        return statistics.fmean(row.score for row in self.group)

    @property
    def ratio(self) -> float:
        return statistics.fmean(row.ratio for row in self.group)

    @property
    def seconds_to_target(self) -> float | None:
        return None if self.target is None else seconds_to(self.target, self.group, self.records)


def find_lines(runs: Sequence[TrainingRun]) -> list[Line]:
    """All lines of the runs; with several runs each line's name starts with its run."""
    lines = []
    for run in runs:
        groups, records = group_seeds(run.rows), steps_by_run(run.records)
        target = run.settings.get("compare", {}).get("target")
        link = run.settings.get("run", {}).get("link")
        for group in groups:
            name = name_group(group, groups)
            shown = f"{run.name}: {name}" if len(runs) > 1 else name
            lines.append(Line(run.name, shown, group, records, target, link))
    return lines


# -- verdict ---------------------------------------------------------------------------------------------------


def judge(lines: Sequence[Line]) -> list[str]:
    """What came out, in a sentence per run; then what went wrong. A run without a dense line is held against another's."""
    sentences = []
    for run in dict.fromkeys(line.run for line in lines):
        own = [line for line in lines if line.run == run]
        sentences.append(judge_run(own, find_dense(own[0], lines)))
    drifted = [line.name for line in lines if not all(r.replicas_identical for r in line.group)]
    if drifted:
        sentences.append(f"The workers ended with different parameters under {', '.join(drifted)}.")
    return sentences


def find_dense(line: Line, lines: Sequence[Line]) -> Line | None:
    """What a line is held against: its own run's dense one, or another run's."""
    alike = [other for other in lines if other.first.metric == line.first.metric]
    own = [other for other in lines if other.run == line.run]
    return next((other for other in (*own, *alike) if other.first.method == "dense"), None)


def judge_run(lines: Sequence[Line], dense: Line | None) -> str:
    """The line that sends least without being worse than dense; without a dense line, the best."""
    others = [line for line in lines if line is not dense]
    if dense is None or not others:
        best = max(lines, key=lambda line: rank(line))
        return f"{say_score(best)} after {best.first.steps:,} steps, {say_bytes(best)}."
    kept = [line for line in others if is_close(line, dense)]
    if not kept:
        best = max(others, key=rank)
        return (
            f"No method came close to dense, which ended at {show_score(dense)}: the best, {best.name}, ended at "
            f"{show_score(best)} and sent {best.ratio:.1f} times fewer bytes."
        )
    best = max(kept, key=lambda line: line.ratio)
    return f"{say_score(best)}, {say_bytes(best)}; dense ended at {show_score(dense)}{say_time(best, dense)}."


def rank(line: Line) -> float:
    """Higher is better, whatever the metric; a score that was lost is the worst."""
    score = line.score if line.first.higher_is_better else -line.score
    return -math.inf if math.isnan(score) else score


def is_close(line: Line, dense: Line) -> bool:
    higher = line.first.higher_is_better
    return not is_worse(line.first.metric, line.score, dense.score, higher_is_better=higher)


def show_score(line: Line) -> str:
    return f"{name_metric(line.first.metric)} {format_score(line.first.metric, line.score)}"


def say_score(line: Line) -> str:
    return f"{line.name} ended at {show_score(line)}"


def say_bytes(line: Line) -> str:
    sent = statistics.fmean(row.wire_bytes_per_step for row in line.group) / 1e6
    if sent == 0:
        return "sending nothing"
    if line.ratio < 1.05:
        return f"sending {sent:.3g} MB a step"
    return (
        f"sending {line.ratio:.1f} times fewer bytes than a dense all-reduce ({sent:.3g} MB a step)"
    )


def say_time(line: Line, dense: Line) -> str:
    """Only of real workers: the time of simulated ones says nothing about a network."""
    one, other = line.first.ms_per_step, dense.first.ms_per_step
    if one is None or other is None or line.first.simulation or dense.first.simulation:
        return ""
    where = f" on {line.link} links" if line.link is not None else ""
    said = f"; a step{where} took {one:.1f} ms, against {other:.1f} ms"
    mine, its = line.seconds_to_target, dense.seconds_to_target
    if line.target is None or line.target != dense.target or mine is None or its is None:
        return said
    goal = format_target(line.first.metric, line.target)
    return f"{said}, and {goal} was reached after {mine:.1f} s, against {its:.1f} s"


# -- table -----------------------------------------------------------------------------------------------------


def make_table(lines: Sequence[Line], styles: Styles) -> Section:
    metrics = {line.first.metric for line in lines}
    score = f"test {name_metric(lines[0].first.metric)}" if len(metrics) == 1 else "test score"
    headings = ["method", "density asked", "density sent", score, "MB/step dense", "MB/step sent"]
    headings += ["ratio", "ms/step", "seeds", "replicas identical"]
    target = next((line.target for line in lines if line.target is not None), None)
    if target is not None:
        goal = format_target(lines[0].first.metric, target)
        headings.insert(-2, f"seconds to {goal}")
    rows = []
    for line in lines:
        numbers: list[str | Html]
        _, *numbers, identical = cells(line.group)
        dense = find_dense(line, lines)
        if dense is not None and not is_close(line, dense):
            numbers[SCORE - 1] = tag("span", str(numbers[SCORE - 1]), class_="bad")
        if target is not None:
            seconds = line.seconds_to_target if line.target == target else None
            numbers.append(format_seconds(seconds))
        alike = identical if identical == "yes" else tag("span", identical, class_="bad")
        swatch = tag(
            "span", class_="swatch", style=f"background:var(--c{find_colour(line, styles)})"
        )
        named = tag("span", swatch, line.name, title=line.first.settings)
        rows.append([named, *numbers, len(line.group), alike])
    notes = "Bytes are those that worker 0 sent; a ratio compares them with DDP's own all-reduce."
    if any(line.first.simulation for line in lines):
        notes += " Workers were simulated in one process: bytes are exact, times say nothing about a network."
    return Section("Results", [table(headings, rows), tag("p", notes, class_="quiet")])


def find_colour(line: Line, styles: Styles) -> int:
    return styles.find(line.first.method, line.name)[0]


# -- curves ----------------------------------------------------------------------------------------------------


def draw_curves(lines: Sequence[Line], styles: Styles) -> Section:
    losses = [curve for line in lines if (curve := loss_curve(line, styles)) is not None]
    charts = []
    if losses:
        about = f"Running mean over {SMOOTHED_OVER} steps; faint: single steps, or the range of the seeds."
        charts.append(Chart("Training loss", "loss", AXES, losses, log_y=True, about=about))
    for metric in dict.fromkeys(line.first.metric for line in lines):
        chosen = [line for line in lines if line.first.metric == metric]
        curves = [curve for line in chosen if (curve := score_curve(line, styles)) is not None]
        if curves:
            unit = ", %" if metric in SHARES else ""
            name = name_metric(metric)
            charts.append(Chart(f"Test {name}", f"{name}{unit}", AXES, curves, dots=True))
    return Section("Curves", charts=charts)


def add_up(steps: Sequence[Record]) -> dict[str, list[float]]:
    """Where every step stands on each axis."""
    return {
        "steps": [float(record["step"]) for record in steps],
        "bytes": list(itertools.accumulate(record["wire_bytes"] / 1e6 for record in steps)),
        "seconds": list(itertools.accumulate((record.get("ms") or 0) / 1e3 for record in steps)),
    }


def loss_curve(line: Line, styles: Styles) -> Curve | None:
    """The mean of the seeds, smoothed, up to where the shortest of them ends."""
    runs = [steps for row in line.group if (steps := line.records.get(row.run))]
    if not runs:
        return None
    count = min(map(len, runs))
    raw = [[math.nan if r["loss"] is None else r["loss"] for r in run[:count]] for run in runs]
    smooth = [running_mean(losses, SMOOTHED_OVER) for losses in raw]
    places = add_up(runs[0][:count])
    points = thin(count)
    columns = [[losses[i] for losses in smooth] for i in points]
    several = len(runs) > 1
    colour, dash = styles.find(line.first.method, line.name)
    return Curve(
        line.name,
        colour,
        dash,
        {key: plain([values[i] for i in points]) for key, values in places.items()},
        plain([statistics.fmean(column) for column in columns]),
        plain([min(column) for column in columns]) if several else [],
        plain([max(column) for column in columns]) if several else [],
        [] if several else plain([raw[0][i] for i in points]),
    )


def score_curve(line: Line, styles: Styles) -> Curve | None:
    """The mean of the seeds at every test, and the range between them."""
    rounds = list(zip(*(row.tests for row in line.group), strict=False))
    if not rounds:
        return None
    steps = [int(one[0][0]) for one in rounds]
    unit = 100 if line.first.metric in SHARES else 1
    # A test that was lost is null in the file.
    scores = [[math.nan if s is None else unit * s for _, s in one] for one in rounds]
    places = add_up(line.records.get(line.first.run, []))
    reached = {int(step): i for i, step in enumerate(places["steps"])}
    x = {"steps": plain([float(step) for step in steps])}
    for key in ("bytes", "seconds"):
        at = [places[key][reached[s]] if s in reached else math.nan for s in steps]
        x[key] = plain(at)
    colour, dash = styles.find(line.first.method, line.name)
    several = len(line.group) > 1
    low, high = (
        plain([pick(values) for values in scores]) if several else [] for pick in (min, max)
    )
    return Curve(line.name, colour, dash, x, plain([*map(statistics.fmean, scores)]), low, high)


# -- layers ----------------------------------------------------------------------------------------------------


def show_layers(lines: Sequence[Line]) -> Section:
    """The plan and the traffic of every parameter; of several seeds, the first one's."""
    tables = [fold_layers(line) for line in lines if line.first.layers]
    return Section("Layers: plan and traffic", tables)


def fold_layers(line: Line) -> Html:
    layers = line.first.layers or []
    headings = ["parameter", "what happens", "why", "shape", "elements", "density sent"]
    headings += ["kB/step dense", "kB/step sent", "ratio"]
    rows = []
    for layer in layers:
        dense, sent, density = layer["dense_bytes"], layer["wire_bytes"], layer["density"]
        rows.append(
            [
                layer["name"],
                layer["action"],
                layer["why"],
                " x ".join(map(str, layer["shape"])) or "scalar",
                f"{layer['elements']:,}",
                "-" if density is None else percent(density),
                "-" if dense is None else f"{dense / 1e3:,.2f}",
                "-" if sent is None else f"{sent / 1e3:,.2f}",
                f"{dense / sent:.1f}x" if sent and dense else "-",
            ]
        )
    return fold(f"{line.name}, {len(layers)} parameters", table(headings, rows, texts=3))
