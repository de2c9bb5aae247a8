"""Ledger: what each exchange put on the wire, by phase. Bytes are counted per request, not estimated from settings."""

from __future__ import annotations

import csv
import io
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from thinwire.errors import UsageError
from thinwire.exchange.requests import Request
from thinwire.observe.files import write_text
from thinwire.observe.sums import DeviceSums

COLUMNS = (
    "run",
    "rank",
    "phase",
    "collective",
    "messages",
    "sent_bytes",
    "payload_bytes",
    "padding_bytes",
    "control_bytes",
    "received_bytes",
    "seconds",
)


@dataclass
class Traffic:
    """Totals of one (phase, collective)."""

    messages: int = 0
    """Collectives this rank took part in."""
    sent_bytes: int = 0
    """Everything put on the wire: payload, padding and control."""
    control_bytes: int = 0
    """Counts, flags, borders, histograms."""
    padding_bytes: int = 0
    """Places of a fixed-size message that no entry took."""
    received_bytes: int = 0
    seconds: float = 0.0
    """From issue to arrival; on NCCL the time the host took to enqueue."""

    @property
    def payload_bytes(self) -> int:
        return self.sent_bytes - self.control_bytes - self.padding_bytes

    def add(self, other: Traffic) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Ledger:
    """Counts on the thread that issues, read by whoever asks."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._rows: dict[tuple[str, str], Traffic] = {}
        self._padding: DeviceSums[tuple[str, str]] = DeviceSums()
        self._lock = threading.Lock()

    def record(self, request: Request, seconds: float, world: int | None = None) -> None:
        """Count one request among `world` ranks (all of them unless it went to a part)."""
        among = self.world if world is None else world
        key = (request.phase, request.kind)
        padding = request.padding_share(among)
        with self._lock:
            row = self._rows.setdefault(key, Traffic())
            row.messages += 1
            row.sent_bytes += request.sent_bytes(among)
            row.received_bytes += request.received_bytes(among)
            row.control_bytes += request.control_share(among)
            row.seconds += seconds
            if isinstance(padding, int):
                row.padding_bytes += padding
            else:
                self._padding.add(key, padding.double())

    def include(self, other: Ledger) -> None:
        """Add what another ledger of this rank has counted."""
        for key, row in other.rows().items():
            with self._lock:
                self._rows.setdefault(key, Traffic()).add(row)

    def rows(self) -> dict[tuple[str, str], Traffic]:
        """Totals by (phase, collective), in the order in which each was first asked for."""
        with self._lock:
            for key, padding in self._padding.take():
                self._rows[key].padding_bytes += round(float(padding))
            return {key: Traffic(**vars(row)) for key, row in self._rows.items()}

    def total(self) -> Traffic:
        """All phases together."""
        total = Traffic()
        for row in self.rows().values():
            total.add(row)
        return total

    def sent_bytes(self) -> int:
        """Without a look at the padding, which may still be on the device: asked in every step."""
        with self._lock:
            return sum(row.sent_bytes for row in self._rows.values())

    def messages(self) -> int:
        return self.total().messages


Line = list[str | int]
"""One row of a ledger file, in the order of COLUMNS."""


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


def write_everybodys_lines(path: Path, mine: Sequence[Line]) -> None:
    """Collective over the default group: rank 0 writes the lines of all ranks, which may be on other machines."""
    gathered: list[Sequence[Line] | None] | None = None
    if dist.get_rank() == 0:
        gathered = [None] * dist.get_world_size()
    dist.gather_object(mine, gathered)
    if gathered is not None:
        write_lines(path, [line for lines in gathered if lines is not None for line in lines])


def write_ledger(path: str | Path, ledgers: Mapping[int, Ledger], run: str = "") -> None:
    """One CSV row per rank, phase and collective; `run` fills the first column."""
    lines = [line for rank, ledger in ledgers.items() for line in ledger_lines(run, rank, ledger)]
    write_lines(path, lines)


def check_ledger_path(path: Path) -> None:
    """Refuse a file that could not be written at the end of a long run."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"ledger is '{path}'; it must be a file in a folder that is there")
