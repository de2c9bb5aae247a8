"""Traffic files: what every rank put on the wire, by run and phase, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

from thinwire.observe import Ledger
from thinwire.tools.files import write_text

COLUMNS = (
    "run", "rank", "phase", "collective", "messages", "sent_bytes", "payload_bytes", "padding_bytes",
    "control_bytes", "received_bytes", "seconds",
)  # fmt: skip

Line = list[str | int]
"""One row of a file, in the order of COLUMNS."""


def ledger_lines(run: str, rank: int, ledger: Ledger) -> list[Line]:
    """What one rank did in one run, phase by phase in the order of the exchange."""
    return [
        [
            run,
            rank,
            phase,
            collective,
            *(getattr(row, name) for name in COLUMNS[4:-1]),
            f"{row.seconds:.6f}",
        ]
        for (phase, collective), row in ledger.rows().items()
    ]


def write_lines(path: str | Path, lines: Iterable[Line]) -> None:
    """A CSV file with the columns of COLUMNS."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(lines)
    write_text(Path(path), text.getvalue())


def write_ledger(path: str | Path, ledgers: Mapping[int, Ledger], run: str = "") -> None:
    """One CSV row per rank, phase and collective; `run` fills the first column."""
    lines = [line for rank, ledger in ledgers.items() for line in ledger_lines(run, rank, ledger)]
    write_lines(path, lines)
