"""Rows of the step benchmark: one flat record per cell, kept in a folder as JSON and as CSV.

The files are the only source of tables and plots. A row that is there is not measured again.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thinwire.bench.step_cell import CLUSTER, KEY, UNRATED, StepCell
from thinwire.errors import UsageError
from thinwire.lab.rates import parse_rate
from thinwire.observe.files import write_text

Row = dict[str, Any]

COLUMNS = (
    "model",
    "method",
    "rate",
    "workers",
    "status",
    "ms",
    "ms_p20",
    "ms_p80",
    "no_sync_ms",
    "ratio_no_sync",
    "noop_ms",
    "ratio_noop",
    "samples_per_s",
    "speedup",
    "link_bytes",
    "ledger_bytes",
    "encode_ms",
    "exchange_ms",
    "decode_ms",
    "exposed_ms",
    "peak_memory_bytes",
    "replicas_identical",
    "steps",
    "settings",
    "parameters",
    "batch",
    "length",
    "amp",
    "bucket_mb",
    "density",
    "rank",
    "device",
    "backend",
    "place",
    "note",
    "seconds",
    "date",
    "commit",
    "cpu",
    "cores",
    "gpu",
    "versions",
)
"""What a row holds, in the order of the CSV; docs/benchmarks.md explains each."""

OK = "ok"
FAILED = "failed"


def make_row(cell: StepCell, place: str, result: dict[str, Any], seconds: float) -> Row:
    """The row of a cell that was measured; `result` is what rank 0 wrote."""
    times, alone = result["times"], statistics.median(result["alone"])
    ms = statistics.median(times)
    row = _frame(cell, place, result["origin"], seconds)
    row |= {
        "status": OK,
        "ms": ms,
        "ms_p20": _percentile(times, 20),
        "ms_p80": _percentile(times, 80),
        "no_sync_ms": alone,
        "ratio_no_sync": ms / alone,
        "samples_per_s": 1000 * cell.workers * cell.batch / ms,
        "speedup": cell.workers * alone / ms,
        "exposed_ms": max(0.0, ms - alone),
        **{name: result[name] for name in COLUMNS if name in result},
    }
    return row


def make_failed_row(
    cell: StepCell, place: str, origin: dict[str, Any], seconds: float, note: str
) -> Row:
    """The row of a cell that did not come through, with the reason in one sentence."""
    return {**_frame(cell, place, origin, seconds), "status": FAILED, "note": note}


def _frame(cell: StepCell, place: str, origin: dict[str, Any], seconds: float) -> Row:
    row: Row = dict.fromkeys(COLUMNS)
    row |= {name: value for name, value in cell.to_dict().items() if name in COLUMNS}
    hardware = origin["hardware"]
    gpus = hardware["gpus"]
    return row | {
        "steps": None,
        "seconds": round(seconds, 1),
        "backend": cell.backend,
        "place": place,
        "note": "",
        "date": origin["date"],
        "commit": origin["commit"],
        "cpu": hardware["cpu"],
        "cores": hardware["cores"],
        "gpu": f"{len(gpus)} x {gpus[0]}" if gpus else "",
        "versions": " ".join(f"{name}={number}" for name, number in origin["versions"].items()),
    }


def _percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def row_key(row: Row) -> tuple[Any, ...]:
    """The key of the cell that a row belongs to."""
    return tuple(row.get(name) for name in KEY)


def add_noop(rows: Sequence[Row]) -> list[Row]:
    """The same rows with `noop_ms` and its ratio taken from the noop row of their model, batch and workers."""
    noop = {_group(row): row["ms"] for row in rows if row["method"] == "noop" and row["ms"]}
    found = []
    for row in rows:
        base = noop.get(_group(row))
        ratio = row["ms"] / base if base and row["ms"] else None
        found.append({**row, "noop_ms": base, "ratio_noop": ratio})
    return found


def _group(row: Row) -> tuple[Any, ...]:
    names = ("model", "workers", "device", "amp", "batch", "length")
    return (row["rate"] == CLUSTER, *(row[name] for name in names))


def rate_bits(row: Row) -> int | None:
    """Bits per second of a row's link; None where it was not shaped."""
    return None if row["rate"] in UNRATED else parse_rate(row["rate"])


class RowBook:
    """The rows of one output folder: `rows.json` and `rows.csv`, complete after every cell."""

    def __init__(self, folder: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"out is '{folder}', which is no folder")
        self.folder = folder
        self.rows: list[Row] = read_rows(folder) if self._json.exists() else []

    @property
    def _json(self) -> Path:
        return self.folder / "rows.json"

    def has(self, cell: StepCell, *, retry_failed: bool = False) -> bool:
        """Whether the cell's row is here already; a failed one counts unless it shall be tried again."""
        return any(
            row_key(row) == cell.key and (row["status"] == OK or not retry_failed)
            for row in self.rows
        )

    def add(self, row: Row) -> Row:
        """Keep a row, in place of an earlier one of the same cell, and save."""
        others = [other for other in self.rows if row_key(other) != row_key(row)]
        self.rows = add_noop([*others, row])
        self.save()
        return self.rows[-1]

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(row) for row in self.rows)
        write_text(self._json, f"[\n{lines}\n]\n")
        write_text(self.folder / "rows.csv", to_csv(self.rows))


def read_rows(path: Path) -> list[Row]:
    """Rows of an output folder or of a rows.json."""
    file = path / "rows.json" if path.is_dir() else path
    try:
        rows = json.loads(file.read_text())
    except FileNotFoundError:
        raise UsageError(f"there is no {file}; run `thinwire bench step` first") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{file} is not a JSON list of rows: {error}") from None
    return [{**dict.fromkeys(COLUMNS), **row} for row in rows]


def to_csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def select_rows(rows: Sequence[Row], keep: Callable[[Row], bool]) -> list[Row]:
    """Measured rows for which `keep` holds."""
    return [row for row in rows if row["status"] == OK and keep(row)]
