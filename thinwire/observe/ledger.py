"""Ledger: what each exchange put on the wire, by phase. Bytes are counted per request, not estimated from settings."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from thinwire.exchange.requests import Collective, Request
from thinwire.observe.sums import DeviceSums


@dataclass
class Traffic:
    """Totals of one (phase, collective)."""

    messages: int = 0
    """Collectives this rank took part in."""
    sent_bytes: int = 0
    """Everything put on the wire: payload, padding and control."""
    control_bytes: int = 0
    """Counts, flags, borders."""
    padding_bytes: int = 0
    """Places of a fixed-size message that no entry took, or none that is kept."""
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
        if not isinstance(request, Collective):
            return
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
