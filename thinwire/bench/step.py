"""The step benchmark: measure cells, those of one setup in the same processes, and keep a row of each."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from thinwire.bench.anchors import GLOO_POWERSGD
from thinwire.bench.host_profile import profile_file
from thinwire.bench.rows import Row, RowBook, make_failed_row, make_row
from thinwire.bench.step_cell import StepCell
from thinwire.bench.step_places import NO_FOLDER, TIME_UP, Attempt, Place
from thinwire.tools.provenance import describe_origin

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
    traces: Path | None = None,
    profiles: Path | None = None,
    say: Listener = print,
    count: Callable[[Sequence[StepCell]], None] = lambda left: None,
) -> list[Row]:
    """Measure every cell that `book` does not hold yet; return the new rows.

    `say` gets a line per cell, `count` the cells that are left, at first and after each. Neighbours of one setup share their processes. After a failure the rest of them gets fresh ones. `timeout_s` is for one
    cell. `deadline` is a time of `time.monotonic()`: cells that cannot be finished before it are left for the next run.
    `traces` and `profiles` are folders for what is looked at beside; a cell without its profile is measured again.
    """
    measured: list[Row] = []
    waiting: list[StepCell] = []

    def keep(cell: StepCell, row: Row) -> None:
        measured.append(book.add(row))
        say(f"{cell.describe()}: {summarise(row)}")
        count(waiting[waiting.index(cell) + 1 :])

    for cell in cells:
        if book.has(cell) and (profiles is None or profile_file(profiles, cell).exists()):
            say(f"{cell.describe()}: already measured")
        else:
            waiting.append(cell)
    count(waiting)
    while waiting:
        _, alike = next(itertools.groupby(waiting, key=lambda cell: cell.setup))
        run = list(alike)
        most = timeout_s * len(run)
        limit = most if deadline is None else min(most, deadline - time.monotonic())
        if deadline is not None and limit < LEAST_BUDGET_S:
            for cell in waiting:
                say(f"{cell.describe()}: left for the next run, time is up")
            break
        done, failed = run_together(run, place, limit, (traces, profiles), keep)
        waiting = waiting[done:]
        if failed is None:
            continue
        row, out_of_time = failed
        if out_of_time and limit < most:
            say(f"{waiting[0].describe()}: left for the next run, time was up before it ended")
        else:
            keep(waiting[0], row)
        waiting = waiting[1:]
    return measured


def run_together(
    cells: Sequence[StepCell],
    place: Place,
    timeout_s: float,
    folders: Sequence[Path | None],
    keep: Callable[[StepCell, Row], None],
) -> tuple[int, tuple[Row, bool] | None]:
    """(how many cells were measured, the row of the one that failed and whether it ran out of time)."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="thinwire-step-") as folder:
        results = Results(Path(folder, "results.jsonl"), cells, place, keep)
        # What a worker says last shall be why it ended.
        command = [
            sys.executable,
            "-W",
            "ignore::FutureWarning",
            "-m",
            "thinwire.bench.step_worker",
        ]
        command += [json.dumps([cell.to_dict() for cell in cells]), str(results.file), place.name]
        command += [NO_FOLDER if one is None else str(one.resolve()) for one in folders]
        with results:
            attempt = place.run(cells[0], command, timeout_s)
    if results.done == len(cells):
        return results.done, None
    cell, seconds = cells[results.done], time.monotonic() - began
    row = make_failed_row(cell, place.name, describe_origin(), seconds, explain(cell, attempt))
    return results.done, (row, attempt.exit_code == TIME_UP)


class Results:
    """Keeps the rows of cells while their workers run: a later cell, or the end of a sitting, must not take them along."""

    LOOK_S = 0.5

    def __init__(
        self,
        file: Path,
        cells: Sequence[StepCell],
        place: Place,
        keep: Callable[[StepCell, Row], None],
    ) -> None:
        self.file = file
        self.done = 0
        self._cells = cells
        self._place = place
        self._keep = keep
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._last = time.monotonic()

    def __enter__(self) -> Results:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()
        self._read()

    def _watch(self) -> None:
        while not self._ended.wait(self.LOOK_S):
            self._read()

    def _read(self) -> None:
        text = self.file.read_text() if self.file.exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()
        for line in whole[self.done :]:
            cell, now = self._cells[self.done], time.monotonic()
            place = self._place
            row = make_row(cell, place.name, json.loads(line), now - self._last, place.note)
            self._keep(cell, row)
            self.done, self._last = self.done + 1, now


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
    wire = "" if sent is None else f", {sent / 1e6:.3g} MB sent per step"
    return (
        f"{row['ms']:.1f} ms ({row['ms_p20']:.1f} to {row['ms_p80']:.1f}), "
        f"{row['ratio_no_sync']:.2f}x of no_sync {row['no_sync_ms']:.1f} ms{wire}, "
        f"{row['seconds']:.0f} s"
    )
