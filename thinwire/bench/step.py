"""The step benchmark: measure cells one by one, each in fresh processes, and keep a row of each at once."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from thinwire.bench.anchors import GLOO_POWERSGD
from thinwire.bench.rows import Row, RowBook, make_failed_row, make_row
from thinwire.bench.step_cell import StepCell
from thinwire.bench.step_places import TIME_UP, Attempt, Place, trace_prefix
from thinwire.observe.provenance import describe_origin

TIMEOUT_S = 300.0
LEAST_BUDGET_S = 10.0
"""With less than this left before a deadline a cell is not begun."""

Listener = Callable[[str], None]


def run_cells(
    cells: Iterable[StepCell],
    book: RowBook,
    place: Place,
    *,
    timeout_s: float = TIMEOUT_S,
    deadline: float | None = None,
    trace: Path | None = None,
    retry_failed: bool = False,
    say: Listener = print,
) -> list[Row]:
    """Measure every cell that `book` does not hold yet; return the new rows.

    `deadline` is a time of `time.monotonic()`: cells that cannot be finished before it are left for the next run.
    """
    measured = []
    for cell in cells:
        if book.has(cell, retry_failed=retry_failed):
            say(f"{cell.describe()}: already measured")
            continue
        limit = timeout_s if deadline is None else min(timeout_s, deadline - time.monotonic())
        if deadline is not None and limit < LEAST_BUDGET_S:
            say(f"{cell.describe()}: left for the next run, time is up")
            continue
        row, out_of_time = run_cell(cell, place, limit, trace)
        if out_of_time and limit < timeout_s:
            say(f"{cell.describe()}: left for the next run, time was up before it ended")
            continue
        measured.append(book.add(row))
        say(f"{cell.describe()}: {summarise(measured[-1])}")
    return measured


def run_cell(
    cell: StepCell, place: Place, timeout_s: float = TIMEOUT_S, trace: Path | None = None
) -> tuple[Row, bool]:
    """(the cell's row, whether it ran out of time)."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="thinwire-step-") as folder:
        answer = Path(folder, "result.json")
        # What a worker says last shall be why it ended.
        command = [
            sys.executable,
            "-W",
            "ignore::FutureWarning",
            "-m",
            "thinwire.bench.step_worker",
        ]
        command += [json.dumps(cell.to_dict()), str(answer), place.name]
        command += [trace_prefix(trace.resolve(), cell)] if trace is not None else []
        attempt = place.run(cell, command, timeout_s)
        result: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {}
    seconds = time.monotonic() - began
    if "times" in result:
        return make_row(cell, place.name, result, seconds), False
    origin = result.get("origin") or describe_origin()
    row = make_failed_row(cell, place.name, origin, seconds, explain(cell, attempt))
    return row, attempt.exit_code == TIME_UP


def explain(cell: StepCell, attempt: Attempt) -> str:
    """Why a cell failed: the known reason, or the last thing its worst rank said."""
    broke_off = (
        attempt.exit_code < 0 or attempt.exit_code >= TIME_UP or "Timed out" in attempt.output
    )
    if cell.method == "ddp-powersgd" and cell.backend == "gloo" and broke_off:
        return f"{GLOO_POWERSGD}: {attempt.reason}"
    lines = [line.strip() for line in attempt.output.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and not line.startswith("File")]
    last = (errors or lines or [""])[-1]
    return f"{attempt.reason} {last}".strip()[:500]


def summarise(row: Row) -> str:
    """One line about a row."""
    if row["status"] != "ok":
        return f"failed: {row['note']}"
    sent = row["link_bytes"] if row["link_bytes"] is not None else row["ledger_bytes"]
    wire = "" if sent is None else f", {sent / 1e6:.2f} MB sent per step"
    return (
        f"{row['ms']:.1f} ms ({row['ms_p20']:.1f} to {row['ms_p80']:.1f}), "
        f"{row['ratio_no_sync']:.2f}x of no_sync {row['no_sync_ms']:.1f} ms{wire}, "
        f"{row['seconds']:.0f} s"
    )
