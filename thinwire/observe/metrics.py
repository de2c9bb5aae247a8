"""metrics.jsonl: one line per step and per test, written by rank 0 while the job runs.

Every line has `run` (the method) and `event`:

    start   steps (how many are planned), parameters
    step    step (from 1), loss (mean over workers), wire_bytes (sent by this worker in this step), ms
    test    step, score
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

Record = dict[str, Any]


class MetricsLog:
    """Appends records to a file, and shows them to `listener` as they come."""

    def __init__(self, path: Path, listener: Callable[[Record], None] | None = None) -> None:
        self._file: TextIO = path.open("w")
        self._listener = listener

    def add(self, records: list[Record]) -> None:
        for record in records:
            self._file.write(json.dumps({k: _finite(v) for k, v in record.items()}) + "\n")
            if self._listener is not None:
                self._listener(record)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


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

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def new_records(self) -> Iterator[Record]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                yield json.loads(line)


def read_metrics(path: Path) -> list[Record]:
    return list(Tail(path).new_records())


def _finite(value: Any) -> Any:
    """JSON has no NaN; a loss that is lost is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
