"""Rows of the step benchmark: one flat record per cell. The files are the only source of tables and plots."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.bench.step_cell import KEY, StepCell
from thinwire.report.step_rows import setup_of
from thinwire.tools.books import FAILED, OK, Book

Row = dict[str, Any]

COLUMNS = (
    "model", "method", "rate", "workers", "status", "ms", "ms_p20", "ms_p80", "no_sync_ms",
    "ratio_no_sync", "noop_ms", "ratio_noop", "samples_per_s", "speedup", "link_bytes",
    "ledger_bytes", "encode_ms", "exchange_ms", "decode_ms", "exposed_ms", "peak_memory_bytes",
    "replicas_identical", "steps", "settings", "parameters", "shapes", "batch", "length", "amp", "parallel",
    "bucket_mb", "density", "rank", "every", "latency", "device", "backend", "place", "note", "seconds", "date",
    "commit", "cpu", "cores", "gpu", "versions",
)  # fmt: skip
"""What a row holds, in the order of the CSV; docs/benchmarks.md explains each."""


def make_row(
    cell: StepCell, place: str, result: dict[str, Any], seconds: float, note: str = ""
) -> Row:
    """The row of a cell that was measured; `result` is what rank 0 wrote, `note` what is to be known about the place."""
    # Of local steps these are the means of whole rounds: most of their steps send nothing.
    times, alone = result["times"], statistics.median(result["alone"])
    ms = statistics.median(times)
    row = _frame(cell, place, result["origin"], seconds)
    row |= {
        "status": OK,
        "note": note,
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


def add_noop(rows: Sequence[Row]) -> list[Row]:
    """The same rows with `noop_ms` and its ratio taken from the noop row of their model, batch and workers."""
    noop = {setup_of(row): row["ms"] for row in rows if row["method"] == "noop" and row["ms"]}
    found = []
    for row in rows:
        base = noop.get(setup_of(row))
        ratio = row["ms"] / base if base and row["ms"] else None
        found.append({**row, "noop_ms": base, "ratio_noop": ratio})
    return found


class RowBook(Book[Row]):
    """The rows of one output folder."""

    benchmark = "bench step"
    columns = COLUMNS

    @staticmethod
    def from_plain(values: Row) -> Row:
        # Rows of before there was a choice are DDP's.
        return {**dict.fromkeys(COLUMNS), "parallel": "ddp", **values}

    @staticmethod
    def to_plain(row: Row) -> Row:
        return row

    @staticmethod
    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in KEY)

    def has(self, cell: StepCell) -> bool:
        """Whether the cell was measured already; one that failed, or whose model was another, is measured again."""
        return any(
            self.key(row) == cell.key
            and row["status"] == OK
            and cell.shapes in (None, row["shapes"])
            for row in self.rows
        )

    def add(self, row: Row) -> Row:
        """Keep a row, in place of an earlier one of the same cell, and save."""
        self.replace([row])
        return self.rows[-1]

    def save(self) -> None:
        self.rows = add_noop(self.rows)
        super().save()


read_rows = RowBook.read


def select_rows(rows: Sequence[Row], keep: Callable[[Row], bool]) -> list[Row]:
    """Measured rows for which `keep` holds."""
    return [row for row in rows if row["status"] == OK and keep(row)]
