"""Ledger: what each exchange put on the wire, by phase. Bytes are counted per request, not estimated from settings."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from thinwire.exchange.requests import Request


@dataclass
class Traffic:
    """Totals of one (phase, collective)."""

    messages: int = 0
    sent_bytes: int = 0
    control_bytes: int = 0
    seconds: float = 0.0


class Ledger:
    """Counts on the thread that issues, read by whoever asks."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._rows: dict[tuple[str, str], Traffic] = {}
        self._lock = threading.Lock()

    def record(self, request: Request, seconds: float) -> None:
        with self._lock:
            row = self._rows.setdefault((request.phase, request.kind), Traffic())
            row.messages += 1
            row.sent_bytes += request.sent_bytes(self.world)
            row.control_bytes += request.control_share(self.world)
            row.seconds += seconds

    def rows(self) -> dict[tuple[str, str], Traffic]:
        with self._lock:
            return {key: Traffic(**vars(row)) for key, row in self._rows.items()}

    def sent_bytes(self) -> int:
        return sum(row.sent_bytes for row in self.rows().values())

    def messages(self) -> int:
        return sum(row.messages for row in self.rows().values())
