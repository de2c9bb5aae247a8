"""Build: run folders in, one page out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.report import plans, steps, training
from thinwire.report.html import Html, flatten, fold, table, tag
from thinwire.report.page import Page, Section, render
from thinwire.report.runs import (
    PlanRun,
    Run,
    StepRun,
    TrainingRun,
    find_runs,
    name_runs,
    read_run,
    read_training,
)
from thinwire.report.timeline import draw_timeline
from thinwire.tools.files import write_text
from thinwire.tools.palette import Styles
from thinwire.version import __version__

REPORT_FILE = "report.html"
SETTINGS = (
    "model", "method", "rate", "workers", "density", "rank", "batch", "length", "amp", "bucket_mb",
    "every", "latency", "device", "backend", "place", "steps",
)  # fmt: skip
"""Columns of a step row that say what was measured."""
ORIGIN = ("date", "commit", "cpu", "cores", "gpu", "versions")
"""Columns of a step row that say what it was measured with."""


def write_report(folder: Path, traces: Path | None = None) -> Path:
    """The page of one run, in its folder."""
    path = folder / REPORT_FILE
    write_text(path, build_report([folder], traces))
    return path


def judge_training(folder: Path) -> list[str]:
    """What the page of a run of `train` or `compare` says first, in sentences."""
    return training.judge(training.find_lines([read_training(folder, folder.name)]))


def build_report(folders: Sequence[Path], traces: Path | None = None) -> str:
    """One page about all of the runs, compared where they can be."""
    folders = find_runs(folders)
    runs = [
        read_run(folder, name, traces)
        for folder, name in zip(folders, name_runs(folders), strict=True)
    ]
    trained = [run for run in runs if isinstance(run, TrainingRun)]
    timed = [run for run in runs if isinstance(run, StepRun)]
    styles = Styles()
    verdict: list[str] = []
    sections: list[Section] = []
    if trained:
        lines = training.find_lines(trained)
        verdict += training.judge(lines)
        sections += [
            training.make_table(lines, styles),
            training.draw_curves(lines, styles),
            training.show_layers(lines),
        ]
    if timed:
        rows = steps.gather_rows(timed)
        verdict += steps.judge(rows)
        sections += [steps.make_table(rows, styles), steps.draw_steps(rows, styles)]
        sections.append(show_timelines(timed))
    planned = [run for run in runs if isinstance(run, PlanRun)]
    verdict += plans.judge(planned)
    for run in planned:
        before = f"{run.name}: " if len(planned) > 1 else ""
        shown = plans.show_plan(run)
        sections += [replace(one, title=f"{before}{one.title}") for one in shown]
    sections += [show_settings(runs), show_origins(runs)]
    title = f"thinwire: {', '.join(run.name for run in runs)}"
    footer = f"Made by thinwire {__version__} from the files of the runs; this page loads nothing from elsewhere."
    return render(Page(title, verdict, sections, footer))


def show_timelines(runs: Sequence[StepRun]) -> Section:
    drawn = [picture for run in runs for trace in run.traces if (picture := draw_timeline(trace))]
    if drawn:
        about = "One traced step on worker 0. Every block is one bucket, or several that travel together."
        drawn.insert(0, tag("p", about, class_="quiet"))
    return Section("Bucket timeline", drawn)


def show_settings(runs: Sequence[Run]) -> Section:
    """What the runs were told, side by side; what differs comes first. Every row of a step benchmark has its own."""
    named = {}
    rows = []
    for run in runs:
        if isinstance(run, TrainingRun):
            named[run.name] = flatten(run.settings)
            before = f"{run.name}: " if len(runs) > 1 else ""
            rows += [[f"{before}{row.run}", row.settings] for row in run.rows]
        elif isinstance(run, PlanRun):
            named[run.name] = flatten(run.plan["settings"])
        else:
            named[run.name] = merge(
                [flatten({k: row.get(k) for k in SETTINGS}) for row in run.rows]
            )
    methods = [table(["row", "method"], rows, texts=2)] if rows else []
    return Section("Settings", [*methods, *side_by_side(named)])


def show_origins(runs: Sequence[Run]) -> Section:
    """What the figures were measured with; of several rows, everything that was."""
    named = {}
    for run in runs:
        if isinstance(run, TrainingRun):
            plain = [flatten(origin) for origin in run.origins]
        elif isinstance(run, PlanRun):
            plain = [flatten(run.plan["origin"])]
        else:
            plain = [flatten({key: row.get(key) for key in ORIGIN}) for row in run.rows]
        named[run.name] = merge(plain)
    return Section("Provenance", side_by_side(named, folded=False))


def merge(many: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Every value that a key has, once; of dates the first and the last."""
    found: dict[str, str] = {}
    for key in dict.fromkeys(key for one in many for key in one):
        values = sorted({one[key] for one in many if one.get(key) not in (None, "", "None")})
        if key == "date" and len(values) > 1:
            found[key] = f"{values[0]} to {values[-1]}"
        elif values:
            found[key] = ", ".join(values)
    return found


def side_by_side(named: Mapping[str, Mapping[str, str]], *, folded: bool = True) -> list[Html]:
    keys = dict.fromkeys(key for values in named.values() for key in values)
    rows = {key: [values.get(key, "-") for values in named.values()] for key in keys}
    different = [key for key in keys if len(set(rows[key])) > 1]
    body = []
    if different:
        body.append(tag("p", "The runs differ in:", class_="quiet"))
        body.append(make_columns(named, different, rows))
    same = [key for key in keys if key not in different]
    if same:
        first = dict(list(named.items())[:1]) if different or len(named) > 1 else named
        shown = make_columns(first, same, rows)
        title = "all other settings" if different else "all settings"
        body.append(fold(title, shown) if folded else shown)
    return body


def make_columns(
    named: Mapping[str, Any], keys: Sequence[str], rows: Mapping[str, Sequence[str]]
) -> Html:
    headings = ["", *(named if len(named) > 1 else [""])]
    lines = [[key, *rows[key][: len(named)]] for key in keys]
    return table(headings, lines, texts=len(headings))
