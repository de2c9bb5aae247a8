"""Compressor: a method at work. The pipeline hands it one group of slots per bucket and step.

`SparseCompressor` joins the stations memory -> select -> wire -> exchange for every sparsifying method;
low-rank methods bring a compressor of their own behind the same face.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.exchange.base import Exchange, Offer, Outcome
from thinwire.exchange.dense import dense_mean
from thinwire.exchange.gather import AllGatherFast
from thinwire.exchange.requests import AllReduce, Place, Program
from thinwire.fused_threshold import FusedTurns
from thinwire.layout import ParameterInfo, Shard, Slot
from thinwire.memory.account import Account
from thinwire.memory.base import Memory, MemoryState
from thinwire.plan.groups import Group
from thinwire.select.base import Picks, Selector, Session
from thinwire.select.rows import RowTable
from thinwire.wire.codec import Codec, Flags
from thinwire.wire.indices import IndexCode
from thinwire.wire.values import ValueCode

SMALL_BESIDE = 8
"""Dense tensors are gathered with payloads of at least this many times their bytes. That costs half the number of ranks more
than a sum on the way, as it does for the payloads; a collective of its own costs its latency and the host's time."""

MOST_MIXTURES = 16
"""Tables kept per group. Slots that change modes one by one make new mixtures for as long as training lasts."""


@dataclass(eq=False)
class BucketStep:
    """One group in one step, still in its bucket and not yet looked at.

    Nobody changes it. A frozen one takes three times as long to make, in every step of every bucket.
    """

    group: Group
    bucket_flat: Tensor
    """The whole bucket with this rank's local gradient."""
    steps: Sequence[int]
    """How often each slot has been exchanged before; the same on all ranks."""
    scale: Tensor | None
    """The GradScaler's scale of these gradients."""
    place: Place
    deterministic: bool
    company: float = 0.0
    """Bytes of this rank's payloads of the same bucket that are gathered."""
    beside: Group | None = None
    """The only other group of the same bucket, in every step, if it is a dense one that would like to be carried along."""
    carrier: Opened | None = None
    """Who carries this group along: nothing is left to do for it."""


@dataclass(frozen=True, eq=False)
class GroupStep:
    """The same after the first look."""

    group: Group
    gradients: Sequence[Tensor]
    """Finite local gradients, one 1-D piece per slot in memory order; the compressor may overwrite them."""
    flags: Flags
    steps: Sequence[int]
    scale: Tensor | None
    place: Place
    deterministic: bool


@dataclass(eq=False)
class Opened:
    """A group on its way: run `program`, then settle `account`. As with `BucketStep`, nobody changes it."""

    program: Program[Outcome]
    account: Account | None
    slot_bytes: Sequence[float]
    """Bytes this rank sends on behalf of each slot."""
    entries: Sequence[int] | None = None
    """Entries this rank sends per slot where shapes alone tell it; None = the outcome's header has the counts."""
    compressed: bool = True
    """False where every element travels; such slots do not count towards the realised density."""
    gathered: bool = False
    """Whether its first request is an all-gather that others can share."""
    carries: Tensor | None = None
    """bool []: whether something was wrong, in this group or in the one `beside` it; None = it carries none."""
    complete: Callable[[Outcome], Outcome] | None = None
    """What is left to do with the program's outcome, once those of all groups of the bucket are there."""

    @cached_property
    def nbytes(self) -> float:
        return sum(self.slot_bytes)


class Compressor(ABC):
    """A method's state and behaviour for all parameters assigned to it."""

    memory: MemoryState | None = None
    """Where this method holds back what it did not send."""
    travels_whole: ClassVar[bool] = False
    """Whether every element is sent: such groups come first, and may travel beside what others gather."""

    @abstractmethod
    def open(self, step: GroupStep) -> Opened:
        """Select and encode now; what is left to do is in the returned program."""

    def open_fused(self, step: BucketStep) -> Opened | None:
        """The same from the bucket itself, by kernels that look at the gradient in the pass that selects.

        None where there are none for this group: the pipeline then looks, and calls `open`.
        """
        return None

    def can_be_carried(self, group: Group, dtype: torch.dtype) -> bool:
        """Whether kernels of another group may take this one's gradients, of that dtype, along."""
        return False

    def expect(self, info: ParameterInfo, device: torch.device) -> None:  # noqa: B027
        """Learn of a parameter before its first step: its state may be asked for earlier."""

    def shard(self, slot: Slot, place: Place) -> Shard:
        """The part of a parameter of which this rank holds back what is not sent."""
        return Shard(slot.shape)

    def state_dict(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What must survive a restart beside the memory, per parameter name, for all `names`."""
        return {}

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:  # noqa: B027
        """Take from `state` what belongs to this compressor's parameters."""


def is_small_beside(group: Group, company: float) -> bool:
    """Whether a group of float32 slots is gathered with payloads of `company` bytes."""
    return SMALL_BESIDE * 4 * group.numel <= company


class SparseCompressor(Compressor):
    """memory -> select -> wire -> exchange."""

    def __init__(
        self,
        select: Selector,
        memory: Memory,
        values: ValueCode,
        indices: IndexCode,
        exchange: Exchange,
    ) -> None:
        self.session = select.session()
        self.memory: MemoryState = memory.start()
        self.values = values
        self.indices = indices
        self.exchange = exchange.session()
        self._codecs: dict[Group, dict[tuple[Hashable, ...], Codec]] = {}
        """By the modes of the group's slots, those used last at the end."""
        self._fused = FusedTurns(self.session, self.memory, self.exchange.exchange)
        self._known_shares: dict[Codec, tuple[list[float], list[int] | None]] = {}
        self._has_modes = type(self.session).mode is not Session.mode

    def _modes(self, group: Group, steps: Sequence[int]) -> tuple[Hashable, ...]:
        if not self._has_modes:
            return (None,) * len(group.slots)
        return tuple(
            self.session.mode(slot.name, count)
            for slot, count in zip(group.slots, steps, strict=True)
        )

    def open_fused(self, step: BucketStep) -> Opened | None:
        modes = self._modes(step.group, step.steps)
        codec = self._codec(step.group, modes)
        shares = self._shares(codec, modes, step.place)
        beside, summed = step.beside, False
        if beside is not None:
            company = sum(shares[0]) / max(1, step.place.world - 1)
            summed = not is_small_beside(beside, company)
            # Where bits must not depend on the bucketing it is not summed as one buffer.
            if summed and (step.deterministic or step.place.world == 1):
                beside = None
        opened = self._fused.open(
            step.group, codec, modes, step.bucket_flat, step.scale, step.place, beside, summed
        )
        if opened is None:
            return None
        account, program = opened
        carries = account.kernels.wrong if account.kernels.before else None
        return Opened(program, account, *shares, gathered=True, carries=carries)

    def open(self, step: GroupStep) -> Opened:
        modes = self._modes(step.group, step.steps)
        codec = self._codec(step.group, modes)
        account = self.memory.compensate(step.group, step.gradients, step.scale)

        def pick() -> Picks:
            return self.session.pick(account.c, codec.table, modes)

        def pick_rows(table: RowTable, members: Sequence[int], c: Tensor | None = None) -> Picks:
            flat = account.c if c is None else c
            return self.session.pick(flat, table, [modes[which] for which in members])

        offer = Offer(
            account,
            pick,
            codec,
            step.flags,
            step.place,
            phase="sparse",
            steps=step.steps,
            deterministic=step.deterministic,
            pick_rows=pick_rows,
            selector=self.session.selector if type(self.session) is Session else None,
            usual_rows=lambda: [
                self.session.selector.rows(slot, None) for slot in step.group.slots
            ],
        )
        shares = self._shares(codec, modes, step.place)
        gathered = type(self.exchange.exchange) is AllGatherFast
        return Opened(self._run(offer, modes), account, *shares, gathered=gathered)

    def _shares(
        self, codec: Codec, modes: Sequence[Hashable], place: Place
    ) -> tuple[list[float], list[int] | None]:
        """(bytes, entries where shapes tell them) of every slot; the same in every step."""
        if codec not in self._known_shares:
            exact = self.session.selector_in(modes).has_exact_count
            known = exact and not self.exchange.exchange.sums_on_the_way
            entries = [rows.entries for rows in codec.table.rows] if known else None
            self._known_shares[codec] = (self._slot_bytes(codec, place), entries)
        return self._known_shares[codec]

    def _run(self, offer: Offer, modes: tuple[Hashable, ...]) -> Program[Outcome]:
        outcome = yield from self.exchange.run(offer)
        offer.account.rest()
        if outcome.header is not None:
            self.session.observe(offer.codec.table, modes, outcome.header)
        return outcome

    def _codec(self, group: Group, modes: tuple[Hashable, ...]) -> Codec:
        known = self._codecs.setdefault(group, {})
        codec = known.pop(modes, None)
        if codec is None:
            rows = [
                self.session.rows(slot, mode) for slot, mode in zip(group.slots, modes, strict=True)
            ]
            table = RowTable(rows, group.numel)
            note_words = self.session.selector_in(modes).note_words
            codec = Codec(table, self.values, self.indices, note_words)
            if len(known) == MOST_MIXTURES:
                self._forget(known.pop(next(iter(known))))
        known[modes] = codec
        return codec

    def _forget(self, codec: Codec) -> None:
        self._fused.forget(codec)
        self._known_shares.pop(codec, None)

    def _slot_bytes(self, codec: Codec, place: Place) -> list[float]:
        shared = (place.world - 1) * codec.control_bytes / max(1, len(codec.table.rows))
        entry_bits = self.exchange.exchange.entry_bits
        return [
            shared
            + rows.entries * entry_bits(self.values.bits, self.indices.bits(rows), place.world) / 8
            for rows in codec.table.rows
        ]

    def shard(self, slot: Slot, place: Place) -> Shard:
        return self.exchange.exchange.shard(self.session.selector.rows(slot, None), place)

    def forget_group(self, group: Group) -> None:
        """Drop tables of a bucketing that is gone."""
        for codec in self._codecs.pop(group, {}).values():
            self._forget(codec)

    def state_dict(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        state = self.session.state_dict(names)
        for name, fields in self.exchange.state_dict(names).items():
            state.setdefault(name, {}).update(fields)
        return state

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        self.session.load_state_dict(state)
        self.exchange.load_state_dict(state)


class FlushCompressor(Compressor):
    """Sends gradient + memory densely once, when a slot turns dense, so that nothing held back is lost.

    Slots no rank had a gradient for get no update and wait for the next step.
    """

    def __init__(self, memory: MemoryState) -> None:
        self.memory: MemoryState = memory

    def open(self, step: GroupStep) -> Opened:
        account = FlushAccount(
            self.memory.compensate(step.group, step.gradients, step.scale), step.group
        )
        world = step.place.world
        slot_bytes = [
            2 * (world - 1) / world * slot.numel * account.c.element_size()
            for slot in step.group.slots
        ]
        entries = [slot.numel for slot in step.group.slots]
        return Opened(self._run(step, account), account, slot_bytes, entries, compressed=False)

    def _run(self, step: GroupStep, account: FlushAccount) -> Program[Outcome]:
        had = step.flags.had_gradient.to(account.c.dtype)
        poison = torch.where(step.flags.non_finite, torch.nan, 0.0).to(account.c.dtype)
        buffer = torch.cat([account.c, poison[None]])
        mean = yield from dense_mean(
            buffer, step.place, deterministic=step.deterministic, phase="flush"
        )
        if step.place.world > 1:
            (had,) = yield (AllReduce(had, "flush/had", had.nbytes),)
        account.used = had > 0
        for shared in account.memory.shared_when_dense:
            shared.copy_(
                (
                    yield from dense_mean(
                        shared.clone(),
                        step.place,
                        deterministic=step.deterministic,
                        phase="flush/momentum",
                    )
                )
            )
        for which, slot in enumerate(step.group.slots):
            piece = slot.span(mean)
            piece.copy_(torch.where(account.used[which], piece, 0.0))
        return Outcome(mean[:-1], ~mean[-1].isfinite())


class FlushAccount(Account):
    """Memory empties only when the step turns out good and the slot's update was used.

    What the cast of the update to a narrower gradient dtype loses is not kept, as in every dense step.
    """

    def __init__(self, memory: Account, group: Group) -> None:
        super().__init__(memory.c)
        self.memory = memory
        self.group = group
        self.used = torch.zeros(len(group.slots), dtype=torch.bool, device=memory.c.device)
        self.delivered = self.used
        self._held: Tensor | None = None

    def bank(self, rounding: Tensor) -> None:
        """There will be no memory to keep it in."""

    def settle(self, bad: Tensor) -> None:
        if self._held is None:
            # A sum of finite numbers can overflow; nothing of that may stay.
            self._held = torch.nan_to_num(self.c, 0.0, 0.0, 0.0)
        self.delivered = self.used & ~bad
        for which, slot in enumerate(self.group.slots):
            kept = torch.where(self.delivered[which], 0.0, slot.span(self._held))
            slot.span(self.c).copy_(kept)
        self.memory.c = self.c
        self.memory.rest()
