"""Stats: what was really sent. Counted while it happens, never copied from a setting."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from thinwire.compressor import Opened
from thinwire.exchange.requests import Place
from thinwire.layout import BucketLayout, Slot
from thinwire.observe.dimensions import DimensionStats
from thinwire.observe.ledger import Ledger
from thinwire.observe.sums import DeviceSums
from thinwire.plan.groups import Group


@dataclass
class ParameterStats:
    """Totals of one parameter on this rank."""

    exchanges: int = 0
    elements: int = 0
    entries: int = 0
    dense_bytes: float = 0.0
    wire_bytes: float = 0.0
    compressed_elements: int = 0
    compressed_entries: int = 0

    @property
    def density(self) -> float:
        """Entries sent / elements."""
        return self.entries / self.elements if self.elements else 0.0


@dataclass(frozen=True)
class Stats:
    """What `handle.stats()` returns; bytes are what this rank put on the wire, all counted steps together."""

    steps: int
    """Synchronising backward passes so far, those before a resume among them."""
    counted_steps: int
    """Those since the handle was made, which is when counting begins."""
    dense_bytes: int
    """What DDP's own all-reduce would have sent."""
    wire_bytes: int
    """What was sent."""
    density: float
    """Entries sent / elements, over the parameters while they were compressed; 1.0 if none was."""
    memory_bytes: int
    """What the memories hold on this rank."""
    parameters: dict[str, ParameterStats] = field(repr=False)
    """The same per parameter."""
    dimensions: dict[str, DimensionStats] | None = field(default=None, repr=False)
    """Rows left out by the last step, per parameter, if asked for."""

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


@dataclass(eq=False)
class Repeated:
    """What a group sent, the same in `times` steps."""

    slots: Sequence[Slot]
    dense_share: float
    """Bytes per element that DDP's own all-reduce would have sent."""
    slot_bytes: Sequence[float]
    entries: Sequence[int] | None
    compressed: bool
    times: int = 0


MOST_REPEATED = 4096
"""Descriptions that are kept before they are added up; a method that makes new ones in every step would pile them up."""


class Tally:
    """Adds up what passes through the pipeline."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.steps = 0
        self._parameters: dict[str, ParameterStats] = {}
        self._lock = threading.Lock()
        self._repeated: dict[tuple[int, ...], Repeated] = {}
        """By the identities of what they hold, counted by the thread that encodes and added up by whoever asks. A step adds a number to each; slot by slot it is counted when somebody asks."""
        self._uncounted: DeviceSums[tuple[str, ...]] = DeviceSums()
        """Entry counts by the names of a group: the groups themselves change with every bucketing and density, and
        would pile up."""

    def add_bucket(
        self, layout: BucketLayout, groups: Sequence[Group], opened: Sequence[Opened], place: Place
    ) -> None:
        """Host-side counts, known before anything travels."""
        dense_share = 2 * (place.world - 1) / place.world * layout.dtype.itemsize
        for group, one in zip(groups, opened, strict=True):
            key = (id(group.slots), id(one.slot_bytes), id(one.entries), one.compressed)
            with self._lock:
                if key not in self._repeated:
                    self._repeated[key] = Repeated(
                        group.slots, dense_share, one.slot_bytes, one.entries, one.compressed
                    )
                self._repeated[key].times += 1
        if len(self._repeated) > MOST_REPEATED:
            self._add_up()

    @property
    def parameters(self) -> dict[str, ParameterStats]:
        """Totals by name."""
        self._add_up()
        return self._parameters

    def _add_up(self) -> None:
        with self._lock:
            repeated, self._repeated = self._repeated, {}
        for one in repeated.values():
            for which, slot in enumerate(one.slots):
                row = self._parameters.setdefault(slot.name, ParameterStats())
                entries = one.times * one.entries[which] if one.entries is not None else 0
                row.exchanges += one.times
                row.elements += one.times * slot.numel
                row.entries += entries
                row.dense_bytes += one.times * one.dense_share * slot.numel
                row.wire_bytes += one.times * one.slot_bytes[which]
                if one.compressed:
                    row.compressed_elements += one.times * slot.numel
                    row.compressed_entries += entries

    def add_counts(self, group: Group, counts: Tensor) -> None:
        """Entries per slot of a selection whose count depends on the data."""
        self._uncounted.add(tuple(slot.name for slot in group.slots), counts.long())

    def stats(
        self,
        steps: int,
        memory_bytes: int,
        dimensions: dict[str, DimensionStats] | None = None,
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
        )

    def _read_counts(self) -> None:
        parameters = self.parameters
        for names, counts in self._uncounted.take():
            for name, count in zip(names, counts.tolist(), strict=True):
                parameters[name].entries += count
                parameters[name].compressed_entries += count
