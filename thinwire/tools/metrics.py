"""metrics.jsonl: one line per step and per test, written by process 0 while the job runs.

Every line has `run` (the cell of the job) and `event`:

    start   steps (up to which the run goes), step (from which it goes on, 0 unless it was resumed), parameters,
            examples_per_step, steps_per_epoch, metric (what the score is)
    step    step (from 1), loss (mean over workers), lr, wire_bytes (sent by this worker in this step), ms, and
            exposed_ms (waiting for nothing but the exchange)
    test    step, score, metrics (all of the task), stats (what the handle has counted so far)
    note    step, sentence (something the user should know)

A resumed run appends. What it does again replaces what an earlier part of the run had done after its last checkpoint.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from thinwire.errors import JobError, UsageError

METRICS_FILE = "metrics.jsonl"
Record = dict[str, Any]
Listener = Callable[[Record], None]
EVENTS = ("start", "step", "test", "note")


class MetricsLog:
    """Writes records to a file, and shows them to listeners as they come."""

    def __init__(
        self,
        path: Path,
        listeners: Sequence[Listener] = (),
        *,
        append: bool = False,
        on_close: Sequence[Callable[[], None]] = (),
    ) -> None:
        if append:
            end_with_a_line(path)
        self._file: TextIO = path.open("a" if append else "w")
        self._listeners = listeners
        self._on_close = on_close

    def add(self, records: list[Record]) -> None:
        try:
            for record in records:
                self._file.write(json.dumps({k: _finite(v) for k, v in record.items()}) + "\n")
            self._file.flush()
        except OSError as error:
            raise JobError(
                f"{self._file.name} cannot be written ({error.strerror}); what was there is kept"
            ) from error
        for record in records:
            for listener in self._listeners:
                listener(record)

    def close(self) -> None:
        self._file.close()
        for call in self._on_close:
            call()


def end_with_a_line(path: Path) -> None:
    """Drop half a line, which a process that was killed left behind."""
    if path.exists():
        # In place: a full disk must not cost what is there.
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


class NoMetrics(MetricsLog):
    """What the ranks other than 0 write."""

    def __init__(self) -> None:
        pass

    def add(self, records: list[Record]) -> None:
        pass

    def close(self) -> None:
        pass


class Tail:
    """Reads a file that is still being written, complete lines only."""

    def __init__(self, path: Path, *, at_end: bool = False) -> None:
        self._path = path
        self._position = path.stat().st_size if at_end and path.exists() else 0

    def new_records(self) -> Iterator[Record]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                yield parse_record(self._path, line)


def parse_record(path: Path, line: bytes) -> Record:
    """One line; UsageError if it is not what `MetricsLog` writes."""
    try:
        record = json.loads(line)
        known = record["event"] in EVENTS
        whole = isinstance(record["run"], str) and isinstance(record["step"], int)
        if record["event"] == "step":
            whole = whole and {"loss", "wire_bytes"} <= record.keys()
    except (ValueError, RecursionError, LookupError, TypeError):
        known = whole = False
    if not known or not whole:
        shown = line[:40].decode(errors="replace").rstrip()
        raise UsageError(
            f"{path} has a damaged line, {shown!r}; remove the line, or the file if no curve is needed"
        )
    return dict(record)


def read_metrics(path: Path) -> list[Record]:
    """What the runs did, each step and test once, whether or not they were resumed."""
    records: dict[tuple[str, str, int | None], Record] = {}
    for record in Tail(path).new_records():
        run, event = record["run"], record["event"]
        if event == "start":
            begun_again = record["step"]
            gone = [key for key in records if key[0] == run and (key[2] or 0) > begun_again]
            for key in gone:
                del records[key]
        records[run, event, None if event == "start" else record["step"]] = record
    return list(records.values())


def _finite(value: Any) -> Any:
    """JSON has no NaN; a loss that is lost is null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
