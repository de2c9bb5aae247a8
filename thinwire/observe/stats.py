"""Stats: what was really sent. Counted while it happens, never copied from a setting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from thinwire.described import Described
from thinwire.exchange.requests import Program, Request
from thinwire.layout import Group
from thinwire.observe.dimensions import DimensionStats
from thinwire.observe.ledger import Ledger
from thinwire.observe.notebook import html_table
from thinwire.observe.sums import DeviceSums

T = TypeVar("T")


@dataclass
class ParameterStats:
    """Totals of one parameter on this rank."""

    exchanges: int = 0
    elements: int = 0
    entries: int = 0
    dense_bytes: float = 0.0
    wire_bytes: float = 0.0
    """Its share of the bytes that were counted for its buckets, by what each parameter in them is expected to send."""
    compressed_elements: int = 0
    compressed_entries: int = 0

    @property
    def density(self) -> float:
        """Entries sent / elements."""
        return self.entries / self.elements if self.elements else 0.0


@dataclass(frozen=True)
class Stats(Described):
    """What `handle.stats()` returns; bytes are what this rank put on the wire, all counted steps together."""

    steps: int
    """Synchronising backward passes so far, those before a resume among them."""
    counted_steps: int
    """Those since the handle was made, which is when counting begins."""
    dense_bytes: int
    """What DDP's own all-reduce would have sent."""
    wire_bytes: int
    """What was sent, in the measurements of tw.Auto() too."""
    density: float
    """Entries sent / elements, over the parameters while they were compressed; 1.0 if none was."""
    memory_bytes: int
    """What the memories hold on this rank."""
    parameters: dict[str, ParameterStats] = field(repr=False)
    """The same per parameter."""
    dimensions: dict[str, DimensionStats] | None = field(default=None, repr=False)
    """Rows left out by the last step, per parameter, if asked for."""
    exposed_ms: float | None = None
    """Milliseconds of a step in which it waited for nothing but the exchange: from its last bucket's being ready to its last
    update. The median of some recent steps; None where nothing travels, or where steps go on meanwhile."""

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than dense; 1 where nothing travels."""
        return self.dense_bytes / self.wire_bytes if self.wire_bytes else 1.0

    @property
    def wire_bytes_per_step(self) -> float:
        return self.wire_bytes / self.counted_steps if self.counted_steps else 0.0

    @property
    def dense_bytes_per_step(self) -> float:
        return self.dense_bytes / self.counted_steps if self.counted_steps else 0.0

    def as_dict(self) -> dict[str, float]:
        """The numbers that are worth plotting, by name; `exposed_ms` is among them where it was measured."""
        values = {
            "steps": self.steps,
            "ratio": self.ratio,
            "density": self.density,
            "wire_bytes_per_step": self.wire_bytes_per_step,
            "dense_bytes_per_step": self.dense_bytes_per_step,
            "memory_bytes": self.memory_bytes,
        }
        return values if self.exposed_ms is None else {**values, "exposed_ms": self.exposed_ms}

    def __str__(self) -> str:
        """What `print` shows."""
        width = max(len(name) for name, _ in self._shown())
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self._shown())

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html_table(("on this rank", ""), self._shown())

    def _shown(self) -> list[tuple[str, str]]:
        rows = [
            ("steps", f"{self.steps:,}"),
            ("MB per step sent", f"{self.wire_bytes_per_step / 1e6:.3f}"),
            ("MB per step dense", f"{self.dense_bytes_per_step / 1e6:.3f}"),
            ("ratio", f"{self.ratio:.1f}"),
            ("density sent", f"{self.density:.2%}"),
            ("MB of memory", f"{self.memory_bytes / 1e6:.3f}"),
        ]
        if self.exposed_ms is not None:
            rows.append(("ms exposed per step", f"{self.exposed_ms:.2f}"))
        return rows


@dataclass(frozen=True)
class TrafficRow:
    """What one parameter is expected to send in every step of a bucket."""

    name: str
    elements: int
    nbytes: float
    entries: int | None
    """None where the data decide."""
    compressed: bool


@dataclass(eq=False)
class WayTraffic:
    """One way of a bucket: what each parameter is expected to send, and how often and how much was sent."""

    rows: Sequence[TrafficRow]
    dense_share: float
    """Bytes per element that DDP's own all-reduce would have sent."""
    times: int = 0
    sent_bytes: int = 0


MOST_ACTIVE = 4096
"""Ways that are kept before they are added up; a method that makes new ones in every step would pile them up."""


class Tally:
    """Adds up what passes through a reducer. A step adds a number or two per bucket; parameters are added up when
    somebody asks."""

    def __init__(
        self,
        ledger: Ledger,
        sent_bytes: Callable[[Request], int],
        most_active: int = MOST_ACTIVE,
    ) -> None:
        """`sent_bytes` tells what this rank puts on the wire for a request."""
        self.ledger = ledger
        self._most_active = most_active
        self.steps = 0
        self._sent_bytes = sent_bytes
        self._parameters: dict[str, ParameterStats] = {}
        self._lock = threading.Lock()
        self._active: dict[int, WayTraffic] = {}
        """By identity: what was counted since it was last added up."""
        self.uncounted: DeviceSums[tuple[str, ...]] = DeviceSums()
        """Entry counts by the names of a group: the groups themselves change with every bucketing and density, and
        would pile up."""

    def count(self, program: Program[T], traffic: WayTraffic) -> Program[T]:
        """The same program; what it asks for is counted."""
        if len(self._active) > self._most_active:
            self._add_up()
        self._note(traffic, 1, 0)
        try:
            batch = next(program)
            while True:
                self._note(traffic, 0, sum(map(self._sent_bytes, batch)))
                batch = program.send((yield batch))
        except StopIteration as finished:
            return finished.value

    def _note(self, traffic: WayTraffic, times: int, sent_bytes: int) -> None:
        with self._lock:
            self._active[id(traffic)] = traffic
            traffic.times += times
            traffic.sent_bytes += sent_bytes

    @property
    def parameters(self) -> dict[str, ParameterStats]:
        """Totals by name."""
        self._add_up()
        return self._parameters

    def _add_up(self) -> None:
        with self._lock:
            active, self._active = list(self._active.values()), {}
            taken = [(one.times, one.sent_bytes) for one in active]
            for one in active:
                one.times = one.sent_bytes = 0
        for traffic, (times, sent_bytes) in zip(active, taken, strict=True):
            expected = sum(row.nbytes for row in traffic.rows)
            for row in traffic.rows:
                total = self._parameters.setdefault(row.name, ParameterStats())
                entries = times * row.entries if row.entries is not None else 0
                total.exchanges += times
                total.elements += times * row.elements
                total.entries += entries
                total.dense_bytes += times * traffic.dense_share * row.elements
                total.wire_bytes += sent_bytes * (row.nbytes / expected) if expected else 0.0
                if row.compressed:
                    total.compressed_elements += times * row.elements
                    total.compressed_entries += entries

    def add_counts(self, group: Group, counts: Tensor) -> None:
        """Entries per slot of a selection whose count depends on the data."""
        self.uncounted.add(tuple(slot.name for slot in group.slots), counts.long())

    def stats(
        self,
        steps: int,
        memory_bytes: int,
        dimensions: dict[str, DimensionStats] | None = None,
        exposed_ms: float | None = None,
    ) -> Stats:
        self._read_counts()
        parameters = self.parameters
        rows = parameters.values()
        compressed = sum(row.compressed_elements for row in rows)
        sent = sum(row.compressed_entries for row in rows)
        return Stats(
            steps=steps,
            counted_steps=self.steps,
            dense_bytes=round(sum(row.dense_bytes for row in rows)),
            wire_bytes=self.ledger.sent_bytes(),
            density=sent / compressed if compressed else 1.0,
            memory_bytes=memory_bytes,
            parameters={name: ParameterStats(**vars(row)) for name, row in parameters.items()},
            dimensions=dimensions,
            exposed_ms=exposed_ms,
        )

    def _read_counts(self) -> None:
        parameters = self.parameters
        for names, counts in self.uncounted.take():
            for name, count in zip(names, counts.tolist(), strict=True):
                parameters[name].entries += count
                parameters[name].compressed_entries += count
