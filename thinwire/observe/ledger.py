"""Ledger: what each exchange put on the wire, by phase. Bytes are counted per request, not estimated from settings."""

from __future__ import annotations

import csv
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from thinwire.exchange.requests import Request

COLUMNS = (
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
        self._padding: dict[tuple[str, str], Tensor] = {}
        """Padding that only the device knows; summed there and read when somebody asks."""
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
                so_far = self._padding.get(key)
                self._padding[key] = padding.double() if so_far is None else so_far + padding

    def rows(self) -> dict[tuple[str, str], Traffic]:
        with self._lock:
            for key, padding in self._padding.items():
                self._rows[key].padding_bytes += round(float(padding))
            self._padding.clear()
            return {key: Traffic(**vars(row)) for key, row in self._rows.items()}

    def total(self) -> Traffic:
        """All phases together."""
        total = Traffic()
        for row in self.rows().values():
            total.add(row)
        return total

    def sent_bytes(self) -> int:
        return self.total().sent_bytes

    def messages(self) -> int:
        return self.total().messages


def write_ledger(path: str | Path, ledgers: Mapping[int, Ledger]) -> None:
    """One CSV row per rank, phase and collective."""
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for rank, ledger in ledgers.items():
            for (phase, collective), row in sorted(ledger.rows().items()):
                numbers = [getattr(row, name) for name in COLUMNS[3:-1]]
                writer.writerow([rank, phase, collective, *numbers, f"{row.seconds:.6f}"])
