"""The step benchmark's table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from thinwire.bench.rows import OK, Row

_NUMBERS = (
    ("ms", "ms", 1, 1.0),
    ("20 %", "ms_p20", 1, 1.0),
    ("80 %", "ms_p80", 1, 1.0),
    ("x no_sync", "ratio_no_sync", 2, 1.0),
    ("x noop", "ratio_noop", 2, 1.0),
    ("samples/s", "samples_per_s", 0, 1.0),
    ("link MB", "link_bytes", 2, 1e-6),
    ("ledger MB", "ledger_bytes", 2, 1e-6),
    ("encode", "encode_ms", 1, 1.0),
    ("exposed", "exposed_ms", 1, 1.0),
    ("decode", "decode_ms", 1, 1.0),
    ("peak GB", "peak_memory_bytes", 2, 1e-9),
)


def step_table(rows: Sequence[Row]) -> Table:
    """Return one line per row; times are milliseconds per step, bytes what one worker sends per step."""
    table = Table(title="a training step; times in ms, bytes sent per worker and step")
    for title in ("model", "method", "rate", "workers"):
        table.add_column(title)
    for title, *_ in _NUMBERS:
        table.add_column(title, justify="right")
    last = None
    for row in sorted(rows, key=lambda row: row["model"]):
        if last not in (None, row["model"]):
            table.add_section()
        last = row["model"]
        table.add_row(
            row["model"], name_method(row), row["rate"], str(row["workers"]), *_cells(row)
        )
    return table


def name_method(row: Row) -> str:
    """The method with the setting that tells it from its siblings."""
    extras = [f"{row['density']:g}"] if row["density"] is not None else []
    extras += [f"r{row['rank']}"] if row["rank"] is not None else []
    extras += [f"{row['bucket_mb']:g} MB"] if row["bucket_mb"] is not None else []
    return " ".join([row["method"], *extras])


def _cells(row: Row) -> list[str]:
    if row["status"] != OK:
        return ["failed", *[""] * (len(_NUMBERS) - 1)]
    return [_number(row[column], digits, scale) for _, column, digits, scale in _NUMBERS]


def _number(value: float | None, digits: int, scale: float) -> str:
    return "" if value is None else f"{value * scale:,.{digits}f}"
