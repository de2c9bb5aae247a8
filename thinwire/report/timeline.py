"""Timeline: when the buckets of one step were encoded, exchanged and decoded, from a trace of `bench step --trace`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.observe import DECODE, ENCODE, EXCHANGE
from thinwire.report.html import Html, fold, tag
from thinwire.tools.palette import WORK

LARGEST_TRACE = 200_000_000
"""Bytes; a larger file would keep the reader waiting for minutes."""
SHOWN_STEP = "step 1"
"""The first of the traced ones may still warm up."""
COLOURS = {ENCODE: WORK["encode"], EXCHANGE: WORK["travels"], DECODE: WORK["decode"]}
WIDTH, LEFT, LANE = 1000, 90, 26


@dataclass(frozen=True)
class Span:
    lane: str
    start_ms: float
    ms: float
    bucket: int
    """In the order in which the lane's work began."""


def read_spans(trace: Path) -> tuple[float, list[Span]]:
    """Milliseconds of the shown step, and the stations' work in it; (0, []) where the trace does not say."""
    if trace.stat().st_size > LARGEST_TRACE:
        return 0.0, []
    try:
        events = json.loads(trace.read_text())["traceEvents"]
        marked = [e for e in events if e.get("ph") == "X" and e.get("cat") == "user_annotation"]
        step = next((e for e in marked if e["name"] == SHOWN_STEP), None)
        if step is None:
            return 0.0, []
        return step["dur"] / 1e3, cut_spans(marked, step["ts"], step["ts"] + step["dur"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return 0.0, []


def cut_spans(marked: Sequence[dict[str, Any]], began: float, ended: float) -> list[Span]:
    spans = []
    for lane in COLOURS:
        inside = [e for e in marked if e["name"] == lane and began <= e["ts"] < ended]
        inside.sort(key=lambda event: event["ts"])
        for bucket, event in enumerate(inside):
            spans.append(Span(lane, (event["ts"] - began) / 1e3, event["dur"] / 1e3, bucket))
    return spans


@dataclass(frozen=True)
class Block:
    """Something that takes time."""

    start_ms: float
    ms: float
    colour: str
    what: str


def draw_timeline(trace: Path) -> Html | None:
    """One lane per station; None where the trace has none of them."""
    whole, spans = read_spans(trace)
    if not spans:
        return None
    lanes = {
        lane.rpartition(":")[2]: [
            Block(span.start_ms, span.ms, colour, f"number {span.bucket + 1}")
            for span in spans
            if span.lane == lane
        ]
        for lane, colour in COLOURS.items()
    }
    return fold(trace.name.removesuffix("-rank0.json"), draw_lanes(lanes, whole), opened=True)


def draw_lanes(lanes: Mapping[str, Sequence[Block]], at_least_ms: float = 0.0) -> Html:
    """Blocks on a common clock, a lane above the other, with the time below."""
    ends = [block.start_ms + block.ms for blocks in lanes.values() for block in blocks]
    whole = max([at_least_ms, *ends]) or 1.0
    scale = (WIDTH - LEFT - 10) / whole
    drawn = []
    for row, (name, blocks) in enumerate(lanes.items()):
        top = 4 + row * LANE
        drawn.append(tag("text", name, x=0, y=top + 15))
        for block in blocks:
            title = f"{block.start_ms:.2f} to {block.start_ms + block.ms:.2f} ms, {block.what}"
            place = {"x": f"{LEFT + scale * block.start_ms:.1f}", "y": top, "height": LANE - 6}
            width = f"{max(1.5, scale * block.ms):.1f}"
            drawn.append(tag("rect", tag("title", title), width=width, fill=block.colour, **place))
    bottom = 4 + LANE * len(lanes)
    for part in range(5):
        at = LEFT + part / 4 * (WIDTH - LEFT - 10)
        anchor = "end" if part == 4 else "middle" if part else "start"
        clock = f"{whole * part / 4:.1f} ms"
        drawn.append(tag("text", clock, x=f"{at:.0f}", y=bottom + 14, text_anchor=anchor))
    size = f"0 0 {WIDTH} {bottom + 20}"
    picture = tag("svg", *drawn, viewBox=size, class_="timeline", role="img")
    return tag("div", picture, class_="wide")
