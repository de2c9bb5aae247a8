"""Rows of `bench step` as people read them: their names, what may be compared, the baseline, the verdict.

The table of the command, its pictures and the report page all read rows through these functions, so that they agree.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.errors import UsageError
from thinwire.lab.rates import parse_rate
from thinwire.tools.books import OK

Row = dict[str, Any]
BASELINES = ("ddp", "hsdp")
"""Plain training, which everything else is held against."""
SILENT = ("no_sync", "noop")
"""They send nothing and are no way to train."""
SETUP = (
    "run", "model", "workers", "device", "amp", "batch", "length", "parallel", "latency",
)  # fmt: skip
"""Rows that agree in these took the same step, but for the method and the link."""
UNRATED = {"any": "any link", "local": "local processes", "cluster": "this cluster"}
"""Links that are no number, and their names for people."""
UNITS = {"k": "k", "m": "M", "g": "G"}
WORTH_IT = 1.05
"""Less than this is not told from noise."""
UNSTEADY = 0.15
"""The step without communication may differ so much between rows of one setup."""


# -- names -----------------------------------------------------------------------------------------------------


def name_row(row: Row) -> str:
    """The method with the settings that tell it from its siblings."""
    extras = [f"{row['density']:g}"] if row.get("density") is not None else []
    extras += [f"r{row['rank']}"] if row.get("rank") is not None else []
    extras += [f"H={row['every']}"] if row.get("every") is not None else []
    extras += [f"{row['bucket_mb']:g} MB"] if row.get("bucket_mb") is not None else []
    return " ".join([row["method"], *extras])


def name_rate(rate: str) -> str:
    """'100 Mbit/s', or what it is called where it is no number."""
    shaped = re.fullmatch(r"([\d.]+)([kmg])bit", rate)
    return rate if shaped is None else f"{shaped[1]} {UNITS[shaped[2]]}bit/s"


def name_link(rate: str) -> str:
    """'at 100 Mbit/s', or on what is no emulated link."""
    if rate in UNRATED:
        return f"on {UNRATED[rate]}"
    named = name_rate(rate)
    return f"on an {rate} link" if named == rate else f"at {named}"


def name_setup(row: Row) -> str:
    """'small, 2 workers', and what else is not as usual."""
    extras = [f"{row['amp']}"] if row.get("amp") not in (None, "none") else []
    extras += [row["parallel"]] if row.get("parallel") not in (None, "ddp") else []
    extras += [f"{row['latency']} of latency"] if row.get("latency") is not None else []
    workers = f"{row['workers']} worker{'s' if row['workers'] != 1 else ''}"
    return ", ".join([row["model"], workers, *extras])


def title_gain(rows: Sequence[Row]) -> str:
    """The heading of what is told against plain training."""
    plain = {str(row.get("parallel") or "ddp").upper() for row in rows}
    return f"against {plain.pop()}" if len(plain) == 1 else "against plain"


def find_rate(row: Row) -> int | None:
    """Bits per second; None where the link was not shaped."""
    try:
        return parse_rate(str(row["rate"]))
    except UsageError:
        return None


def sent_mb(row: Row) -> float | None:
    """What the link counted, or else what the ledger did."""
    counted = row.get("link_bytes")
    counted = row.get("ledger_bytes") if counted is None else counted
    return None if counted is None else float(counted) / 1e6


# -- what may be compared --------------------------------------------------------------------------------------


def current_rows(rows: Sequence[Row]) -> list[Row]:
    """Without the rows of a model that has been changed since: of every model only those that are made like its newest row.

    Rows of before there were hashes count as unchanged, unless the model is the user's own.
    """
    newest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        name = (row.get("run"), row["model"])
        if name not in newest or str(row.get("date")) >= str(newest[name].get("date")):
            newest[name] = row
    return [
        row
        for row in rows
        if row.get("shapes") == newest[row.get("run"), row["model"]].get("shapes")
        or (row.get("shapes") is None and ":" not in row["model"])
    ]


def setup_of(row: Row) -> tuple[Any, ...]:
    """What rows must share to be compared. A cluster's machines are others than this one."""
    return (row["rate"] == "cluster", *(row.get(name) for name in SETUP))


def by_setup(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one setup together, in the order of their first."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(setup_of(row), []).append(row)
    return list(groups.values())


def find_ddp(row: Row, rows: Sequence[Row]) -> Row | None:
    """Plain training on the same link; the fastest where it was measured in several ways."""
    same = [
        one
        for one in rows
        if one["method"] in BASELINES
        and one["status"] == OK
        and one["rate"] == row["rate"]
        and setup_of(one) == setup_of(row)
    ]
    return min(same, key=lambda one: one["ms"], default=None)


def against_ddp(row: Row, rows: Sequence[Row]) -> float | None:
    """How many times as fast as plain training on the same link; None where one of the two was not measured."""
    base = find_ddp(row, rows)
    return base["ms"] / row["ms"] if base is not None and row["status"] == OK else None


# -- the step without communication ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Baseline:
    """The step without communication, over all rows of one setup."""

    ms: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        return (self.high - self.low) / self.ms


def find_baseline(rows: Sequence[Row]) -> Baseline | None:
    """Of rows of one setup. Every one of them has measured it in its own processes."""
    times = [row["no_sync_ms"] for row in rows if row["status"] == OK]
    if not times:
        return None
    return Baseline(statistics.median(times), min(times), max(times))


def warn(rows: Sequence[Row]) -> list[str]:
    """A sentence per setup whose step without communication was not always the same."""
    sentences = []
    for group in by_setup(rows):
        base = find_baseline(group)
        if base is not None and base.spread > UNSTEADY:
            sentences.append(
                f"Warning: without communication a step took {base.low:.1f} to {base.high:.1f} ms ({name_setup(group[0])}), "
                f"{base.spread:.0%} apart; this machine was not quiet, and smaller differences between methods mean nothing."
            )
    return sentences


# -- verdict ---------------------------------------------------------------------------------------------------


def judge(rows: Sequence[Row]) -> list[str]:
    """A sentence per setup and link that plain training was measured on, slowest link first."""
    measured = [row for row in rows if row["status"] == OK]
    sentences = []
    for group in by_setup(measured):
        places = {row["rate"]: row for row in group if row["method"] in BASELINES}
        for row in sorted(places.values(), key=lambda row: find_rate(row) or float("inf")):
            sentences += judge_place(row, group)
    return sentences or [
        "Plain DDP was not measured, so there is nothing to compare with; leave --no-anchors out."
    ]


def judge_place(place: Row, group: Sequence[Row]) -> list[str]:
    """The fastest method on one link against plain training there; local steps by themselves, for they train otherwise."""
    base = find_ddp(place, group)
    assert base is not None, "the place is one that it was measured on"
    named = base["method"].upper()
    where = f"{name_link(base['rate'])} ({name_setup(base)})"
    rivals = [
        row
        for row in group
        if row["rate"] == base["rate"] and row["method"] not in (*SILENT, *BASELINES)
    ]
    stepwise = [row for row in rivals if row.get("every") is None]
    local = [row for row in rivals if row.get("every") is not None]
    sentences = []
    if not rivals:
        sentences.append(f"Only {named} was measured {where}, {base['ms']:.1f} ms a step.")
    if stepwise:
        best = min(stepwise, key=lambda row: row["ms"])
        gain, times = compare(best, base)
        sentences.append(
            f"{name_row(best)} is {gain:.1f}x faster than {named} {where}: {times}."
            if gain >= WORTH_IT
            else f"Do not compress {where}: nothing is faster than {named}; the best, {name_row(best)}, takes {times}."
        )
    if local:
        best = min(local, key=lambda row: row["ms"])
        gain, times = compare(best, base)
        sentences.append(
            f"Local steps change the optimisation: {name_row(best)} takes {times} ms with {named}, {gain:.1f}x, {where}."
        )
    return sentences


def compare(row: Row, base: Row) -> tuple[float, str]:
    return base["ms"] / row["ms"], f"{row['ms']:.1f} ms a step against {base['ms']:.1f}"
