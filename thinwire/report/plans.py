"""Plans: verdict, table, charts and timeline of what `thinwire plan` predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.report.charts import Axis, Chart, Curve, plain
from thinwire.report.html import Html, fold, table, tag
from thinwire.report.page import Section
from thinwire.report.runs import PlanRun
from thinwire.report.timeline import Block, draw_lanes
from thinwire.tools.palette import WORK as COLOURS
from thinwire.tools.palette import Styles, find_method

RATES = Axis("rate", "link", "Gbit/s of each link", log=True)
WORK = {
    "encode": ("ready", "encoded", COLOURS["encode"]),
    "waits for the link": ("encoded", "sent", COLOURS["waits"]),
    "on the link": ("sent", "arrived", COLOURS["travels"]),
}
"""What a bucket does: from when, until when, and its colour."""
MOST_BUCKETS = 60
"""Lanes of a timeline; more could not be read."""


def judge(runs: Sequence[PlanRun]) -> list[str]:
    named = len(runs) > 1
    return [
        f"{run.name}: {sentence}" if named else sentence
        for run in runs
        for sentence in run.plan["sentences"]
    ]


def show_plan(run: PlanRun) -> list[Section]:
    """All of one plan; everything in it but the step without communication is predicted."""
    found = run.plan
    return [
        make_table(found),
        Section("Step time, predicted", charts=[draw_rates(found)]),
        Section("Buckets, predicted", [*map(draw_buckets, found["timelines"])]),
        show_units(found),
    ]


def make_table(found: dict[str, Any]) -> Section:
    headings = ["candidate", "verdict", "step ms", "exposed ms", "MB sent", "kept", "tried ms"]
    rows = [
        [
            row["name"],
            row["verdict"],
            f"{row['step_ms']:,.1f}",
            f"{row['exposed_ms']:,.1f}",
            f"{row['sent_mb']:,.2f}",
            f"{row['kept']:.1%}",
            "" if row["measured_ms"] is None else f"{row['measured_ms']:,.1f}",
        ]
        for row in found["candidates"]
    ]
    notes = f"A step without communication takes {found['silent_ms']:,.1f} ms, measured. The rest is predicted."
    shown = [table(headings, rows, texts=2), tag("p", notes, class_="quiet")]
    return Section("Candidates", shown)


def draw_rates(found: dict[str, Any]) -> Chart:
    curves = []
    rates = plain([float(rate) for rate in found["rates"]])
    styles = Styles()
    for name, times in found["step_ms"].items():
        # As in the pictures of the plan: the choice is black and dotted.
        colour, dash = (0, 2) if name == "chosen" else styles.find(find_method(name), name)
        curves.append(Curve(name, colour, dash, {"rate": rates}, plain(times)))
    return Chart("Step time against link rate", "ms per step", [RATES], curves, log_y=True)


def draw_buckets(timeline: dict[str, Any]) -> Html:
    spans = timeline["spans"][:MOST_BUCKETS]
    lanes = {
        f"bucket {i + 1}": [
            Block(span[begin], span[end] - span[begin], colour, f"bucket {i + 1}: {work}")
            for work, (begin, end, colour) in WORK.items()
            if span[end] > span[begin]
        ]
        for i, span in enumerate(spans)
    }
    keys = [
        tag("span", tag("span", class_="swatch", style=f"background:{colour}"), f"{work}  ")
        for work, (_, _, colour) in WORK.items()
    ]
    title = f"{timeline['name']}: {timeline['step_ms']:,.1f} ms a step"
    return fold(title, draw_lanes(lanes), tag("p", *keys, class_="quiet"), opened=True)


def show_units(found: dict[str, Any]) -> Section:
    """What is chosen for which parameters."""
    headings = ["buckets", "chosen", "parameters", "elements", "ready after ms"]
    rows = [
        [
            number,
            unit["label"],
            ", ".join(unit["parameters"]),
            f"{unit['elements']:,}",
            f"{unit['ready_ms']:,.2f}",
        ]
        for number, unit in enumerate(found["units"], start=1)
    ]
    shown = fold(f"{len(rows)} groups of buckets", table(headings, rows, texts=3))
    return Section("Plan by layer", [shown])
