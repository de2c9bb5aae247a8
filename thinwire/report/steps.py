"""Steps: verdict, table, charts and timeline of runs of `bench step`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.report import step_rows
from thinwire.report.charts import Axis, Chart, Curve, plain
from thinwire.report.html import Html, table, tag
from thinwire.report.page import Section
from thinwire.report.runs import StepRun
from thinwire.report.step_rows import (
    SILENT,
    Row,
    against_ddp,
    current_rows,
    find_baseline,
    find_rate,
    name_row,
    sent_mb,
    setup_of,
)
from thinwire.tools.books import OK
from thinwire.tools.palette import Styles
from thinwire.tools.step_parts import PARTS, split_step

AXES = (
    Axis("rate", "link", "Gbit/s of each link", log=True),
    Axis("bytes", "bytes", "MB sent per worker and step", log=True),
    Axis("workers", "workers", "workers"),
)


def gather_rows(runs: Sequence[StepRun]) -> list[Row]:
    """All rows that hold still, each with the name of its run; by model and workers, slowest link and fastest step first."""
    rows = [{**row, "run": run.name} for run in runs for row in run.rows]
    return sorted(current_rows(rows), key=place_row)


def place_row(row: Row) -> tuple[Any, ...]:
    rate, ms = find_rate(row), row["ms"]
    endless = float("inf")
    return (
        row["model"],
        row["workers"],
        endless if rate is None else rate,
        endless if ms is None else ms,
    )


def judge(rows: Sequence[Row]) -> list[str]:
    """What came out, what failed, and what to be careful about."""
    sentences = step_rows.judge(rows)
    failed = [row for row in rows if row["status"] != OK]
    if failed:
        names = ", ".join(dict.fromkeys(f"{name_row(row)} {row['rate']}" for row in failed))
        sentences.append(f"{len(failed)} of {len(rows)} measurements failed: {names}.")
    return [*sentences, *step_rows.warn(rows)]


# -- table and charts ------------------------------------------------------------------------------------------


def make_table(rows: Sequence[Row], styles: Styles) -> Section:
    headings = [
        "method",
        "model",
        "link",
        "workers",
        "ms",
        "20 % to 80 %",
        step_rows.title_gain(rows),
    ]
    headings += ["MB/step", "samples/s", "x no_sync", "note"]
    several = len({row["run"] for row in rows}) > 1
    lines = []
    for row in rows:
        colour = styles.find(row["method"], name_row(row))[0]
        swatch = tag("span", class_="swatch", style=f"background:var(--c{colour})")
        named = f"{row['run']}: {name_row(row)}" if several else name_row(row)
        lines.append([tag("span", swatch, named), *describe(row, rows)])
    notes = (
        "Milliseconds are the median of the measured steps; MB are what one worker sent in a step."
    )
    return Section(
        "Steps measured", [table(headings, lines, texts=3), tag("p", notes, class_="quiet")]
    )


def describe(row: Row, rows: Sequence[Row]) -> list[Any]:
    """The cells behind a row's name; the step without communication is that of its setup."""
    gain, sent = against_ddp(row, rows), sent_mb(row)
    base = find_baseline([one for one in rows if setup_of(one) == setup_of(row)])
    measured = row["status"] == OK
    note = row.get("note") or ""
    return [
        row["model"],
        row["rate"],
        row["workers"],
        f"{row['ms']:,.1f}" if measured else tag("span", "failed", class_="bad"),
        f"{row['ms_p20']:,.1f} to {row['ms_p80']:,.1f}" if measured else "",
        "" if gain is None else f"{gain:.2f}x",
        "" if sent is None else f"{sent:,.3f}",
        f"{row['samples_per_s']:,.0f}" if measured else "",
        f"{row['ms'] / base.ms:,.2f}" if measured and base is not None else "",
        tag("span", note, class_="quiet"),
    ]


def draw_steps(rows: Sequence[Row], styles: Styles) -> Section:
    """A chart of step times per model, and a bar for where each step goes."""
    measured = [row for row in rows if row["status"] == OK and row["method"] not in SILENT]
    charts = []
    for model in dict.fromkeys(row["model"] for row in measured):
        chosen = [row for row in measured if row["model"] == model]
        chart = draw_model(model, chosen, styles)
        charts += [chart] if chart.axes else []
    bars = [draw_bars(measured)] if measured else []
    return Section("Step time", bars, charts)


def draw_model(model: str, rows: Sequence[Row], styles: Styles) -> Chart:
    """Only axes on which every line has a place and on which they differ: without shaped links, for one, there are no rates."""
    several = len({row["run"] for row in rows}) > 1
    counts = {row["workers"] for row in rows}
    lines: dict[str, list[Row]] = {}
    for row in rows:
        name = f"{row['run']}: {name_row(row)}" if several else name_row(row)
        name += f", {row['workers']} workers" if len(counts) > 1 else ""
        name += f", {row['latency']} of latency" if row.get("latency") is not None else ""
        lines.setdefault(name, []).append(row)
    curves = []
    for name, points in lines.items():
        points.sort(key=lambda row: find_rate(row) or 0)
        colour, dash = styles.find(points[0]["method"], name_row(points[0]))
        x = {
            "rate": plain([(find_rate(row) or float("nan")) / 1e9 for row in points]),
            "bytes": plain([sent_mb(row) or float("nan") for row in points]),
            "workers": plain([float(row["workers"]) for row in points]),
        }
        y, low, high = (plain([row[one] for row in points]) for one in ("ms", "ms_p20", "ms_p80"))
        curves.append(Curve(name, colour, dash, x, y, low, high))
    usable = [axis for axis in AXES if is_usable(axis, curves)]
    about = "Shaded: 20 % to 80 % of the steps."
    return Chart(model, "ms per step", usable, curves, log_y=True, dots=True, about=about)


def is_usable(axis: Axis, curves: Sequence[Curve]) -> bool:
    places = [[value for value in curve.x[axis.key] if value is not None] for curve in curves]
    return all(places) and len({value for values in places for value in values}) > 1


def draw_bars(rows: Sequence[Row]) -> Html:
    """Where each step goes. Encoding and decoding are shown as far as the step is longer than computing alone."""
    longest = max(row["ms"] for row in rows)
    lines = []
    for row in rows:
        base = find_baseline([one for one in rows if setup_of(one) == setup_of(row)])
        parts = split_step(row, row["no_sync_ms"] if base is None else base.ms)
        spans = [
            tag(
                "span",
                style=f"width:{100 * ms / longest:.2f}%;background:{PARTS[part]}",
                title=f"{part}: {ms:.1f} ms",
            )
            for part, ms in parts.items()
        ]
        named = f"{name_row(row)}, {row['model']}, {row['rate']}, {row['workers']} workers"
        lines.append([named, tag("div", *spans, class_="bar"), f"{row['ms']:,.1f}"])
    keys = [
        tag("span", tag("span", class_="swatch", style=f"background:{colour}"), f"{part}  ")
        for part, colour in PARTS.items()
    ]
    drawn = tag("div", table(["where a step goes", "", "ms"], lines, texts=2), class_="bars")
    return tag("div", drawn, tag("p", *keys, class_="quiet"))
