"""SparseCompressor: memory -> select -> wire -> exchange, for every sparsifying method."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from thinwire.compress.backends import SparseTask, find_backend
from thinwire.compress.base import Compressor, GroupPlan, GroupStep, Opened, Route, Terms
from thinwire.compress.refresh import MeanGradient
from thinwire.exchange.all_gather import GATHERED_PAYLOADS
from thinwire.exchange.base import Exchange, ExchangeSession, Offer, Outcome
from thinwire.exchange.requests import Place, Program
from thinwire.kernels.inspection import drop_if_bad, holds_non_finite, inspect
from thinwire.kernels.journal import Journal
from thinwire.layout import Group, RowTable, Shard, Slot, SlotRows
from thinwire.memory.base import Memory, MemoryState
from thinwire.memory.clip import Clip
from thinwire.select.base import Selector
from thinwire.wire.codec import Codec, Flags
from thinwire.wire.indices import IndexCode
from thinwire.wire.values import ValueCode


class SparseCompressor(Compressor):
    """The parts of a sparse method at work."""

    def __init__(
        self,
        select: Selector,
        memory: Memory,
        values: ValueCode,
        indices: IndexCode,
        exchange: Exchange,
        clip: Clip | None = None,
    ) -> None:
        self.session = select.session()
        self.memory: MemoryState = memory.start()
        self.values = values
        self.indices = indices
        self.exchange = exchange.session()
        self.clip = clip

    def keep_journal(self, journal: Journal) -> None:
        super().keep_journal(journal)
        self.session.keep_journal(journal)
        self.exchange.keep_journal(journal)

    def plan(self, group: Group, terms: Terms) -> GroupPlan:
        return SparsePlan(self, group, terms)

    def shard(self, slot: Slot, place: Place) -> Shard:
        return self.exchange.exchange.shard(self.session.selector.rows(slot), place)

    def state_dict(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        state = self.session.state_dict(names)
        for name, fields in self.exchange.state_dict(names).items():
            state.setdefault(name, {}).update(fields)
        return state

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        self.session.load_state_dict(state)
        self.exchange.load_state_dict(state)


class SparsePlan(GroupPlan):
    """A group of a sparse method: its codec and its backend in every combination of modes."""

    def __init__(self, parts: SparseCompressor, group: Group, terms: Terms) -> None:
        super().__init__(group)
        self._parts = parts
        self._terms = terms
        self._names = [slot.name for slot in group.slots]
        self._shared: dict[str, object] = {}

    def begin(self, counts: Sequence[int]) -> Hashable:
        parts = self._parts
        return parts.session.begin(self._names, counts), parts.memory.due(self._names, counts)

    def route(self, modes: Hashable) -> Route:
        assert isinstance(modes, tuple)
        selection_mode, refresh = modes
        parts, turn = self._parts, self._parts.session.turn(selection_mode)
        rows = [turn.rows(index, slot) for index, slot in enumerate(self.group.slots)]
        table = RowTable(rows, self.group.numel)
        codec = Codec(table, parts.values, parts.indices, turn.note_words)
        exchange = parts.exchange.exchange
        fixed = turn.has_exact_count and not exchange.sums_on_the_way
        place = self._terms.place
        mean_gradient = MeanGradient(self.group, place, parts.memory, refresh)
        task = SparseTask(
            self.group,
            self._terms,
            turn,
            parts.memory,
            codec,
            exchange,
            parts.clip,
            mean_gradient.add_bytes(expected_bytes(codec, exchange, place)),
            [one.entries for one in rows] if fixed else None,
            self._shared,
            mean_gradient,
        )
        backend, objection = find_backend(task)
        if backend is not None:
            return backend.route(task)
        usual = [parts.session.selector.rows(slot) for slot in self.group.slots]
        return PartsRoute(task, parts.exchange, usual, objection)


def expected_bytes(codec: Codec, exchange: Exchange, place: Place) -> list[float]:
    """Bytes this rank sends on behalf of each slot, by the exchange's own count of bits per entry."""
    shared = (place.world - 1) * codec.control_bytes / max(1, len(codec.table.rows))
    return [
        shared
        + exchange.slot_bits(rows, codec.values.bits, codec.indices.bits(rows), place.world) / 8
        for rows in codec.table.rows
    ]


class PartsRoute(Route):
    """The parts one after another, in torch: what every other backend has to do bit for bit."""

    def __init__(
        self,
        task: SparseTask,
        exchange: ExchangeSession,
        usual_rows: Sequence[SlotRows],
        objection: str,
    ) -> None:
        super().__init__(task.group, task.slot_bytes, task.entries)
        self.task = task
        self.exchange = exchange
        self.usual_rows = usual_rows
        self.objection = objection
        self.sees_overflow = (
            task.selection.session.selector.takes_largest and task.exchange.offers_all
        )
        """Whether a sum of finite numbers that overflows is always among the chosen."""
        self.gathered_bytes, self.gathered_after = task.gathered()
        if task.exchange.form == GATHERED_PAYLOADS:
            self.gathered_bytes = sum(task.slot_bytes)

    def open(self, step: GroupStep) -> Opened:
        flags, gradients = inspect(self.task.group, step.bucket_flat)
        return self.begin(flags, gradients, step)

    def begin(self, flags: Flags, gradients: Sequence[Tensor], step: GroupStep) -> Opened:
        """The same after the first look: finite gradients, one 1-D piece per slot in memory order."""
        task = self.task
        if task.clip is not None:
            gradients = task.clip.apply(gradients, step.scale, task.terms.place.world)
        account = task.memory.compensate(task.group, gradients, step.scale)
        if not self.sees_overflow:
            overflow = holds_non_finite(account.c)
            flags = replace(flags, non_finite=flags.non_finite | overflow)
            drop_if_bad(account.c, overflow)
        offer = Offer(
            account,
            task.selection,
            task.codec,
            flags,
            task.terms.place,
            phase="sparse",
            counts=step.counts,
            usual_rows=self.usual_rows,
        )
        return Opened(self._run(offer, gradients, step), offer.account)

    def _run(self, offer: Offer, gradients: Sequence[Tensor], step: GroupStep) -> Program[Outcome]:
        task = self.task
        flags = yield from task.mean_gradient.run(gradients, offer.flags, step.counts, step.scale)
        divisor = task.memory.divisor(task.group, step.scale)
        offer = replace(offer, flags=flags, divisor=divisor)
        outcome: Outcome = yield from self.exchange.run(offer)
        offer.account.rest()
        header = outcome.header
        if header is not None:
            self.task.selection.observe(self.task.codec.table, header.notes, header.counts)
        return outcome
