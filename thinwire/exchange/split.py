"""Split-and-reduce: a sparse reduce-scatter to owners, a global selection, and an all-gather of the winners.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (Ok-Topk, PPoPP'22). `SplitReduce` is
thinwire's form of it: every message has a size that shapes alone give, so that the volume is bounded on every step and
the host never waits. `reused.py` keeps the published form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.exchange.agreed import contribute, sums_by_owner
from thinwire.exchange.base import Exchange, Offer, Outcome
from thinwire.exchange.common import (
    NO_ENTRY,
    any_non_finite,
    flags_requests,
    keep_alone,
    read_flags,
    remembered,
    to_wire,
    wire_dtype,
)
from thinwire.exchange.lockstep import TeamProgram, abreast, alike, jointly
from thinwire.exchange.places import (
    INDEX_BYTES,
    LARGEST_CAPACITY,
    Owned,
    Places,
    Proposal,
    compact,
    pack,
    pack_left,
    positions_of,
    propose,
    reduce_arrived,
    unpack,
)
from thinwire.exchange.regions import HashedRegions
from thinwire.exchange.requests import AllGather, AllToAll, Program
from thinwire.exchange.segments import Segments
from thinwire.exchange.threshold import (
    EXACT,
    Candidates,
    Rounds,
    choose_largest,
    magnitude_bits,
    rounds_for,
)
from thinwire.select.rows import RowTable
from thinwire.validate import check_choice, check_finite_number

TEAM_ELEMENTS = 1 << 23
"""Elements of the groups of one team of virtual ranks: beyond that an operation takes longer than its launch, and the
stacked numbers need memory."""

Threshold = Literal["auto", "exact"]
Contribution = Literal["selected", "full"]


@dataclass(frozen=True, kw_only=True)
class SplitReduce(Exchange):
    """Ok-Topk with exact thresholds and a hard bound: at most 6k(P-1)/P words on every step (from P entries per slot on).

    1. Select locally.
    2. Send each entry to the owner of its place, at most `capacity` x k/P per slot and owner, largest first; the rest
       stays in memory.
    3. Owners add what arrived, in rank order.
    4. The k largest sums of every slot win: radix select over all owners, exactly k, ties shared out.
    5. Winners are gathered, again at most `capacity` x k/P per slot and owner.
    6. What was sent and did not win returns to memory.

    `contribution="full"`: only the winners' places are gathered, then every rank's whole compensated gradient there is
    added by an all-reduce: better contraction for about one word more per entry.
    """

    capacity: float = 1.25
    """Places per slot and owner, as a multiple of k/P."""
    threshold: Threshold = "auto"
    """"auto" takes a coarser histogram for slots with few entries, where an exact one would cost more than it
    steers; "exact" always looks at all bits. Both keep exactly k."""
    contribution: Contribution = "selected"

    sums_on_the_way = True

    def __post_init__(self) -> None:
        check_finite_number("capacity", self.capacity)
        if not 1.0 <= self.capacity <= LARGEST_CAPACITY:
            raise UsageError(
                f"capacity is {self.capacity!r}; it must be between 1 and {LARGEST_CAPACITY}, beyond which "
                "6k(P-1)/P words no longer hold"
            )
        check_choice("threshold", self.threshold, ("auto", "exact"))
        check_choice("contribution", self.contribution, ("selected", "full"))

    def entry_bits(self, value_bits: float, index_bits: float, world: int) -> float:
        split = self.capacity * (32 + value_bits)
        back = self.capacity * 32 + 2 * value_bits if self.contribution == "full" else split
        return (split + back) * (world - 1) / world

    def run(self, offer: Offer) -> Program[Outcome]:
        if offer.place.world == 1:
            return keep_alone(offer)
        table = offer.codec.table
        most = max(1, TEAM_ELEMENTS // max(1, table.numel))
        outcome = yield from jointly(
            offer,
            offer.place,
            (self, table.signature),
            most,
            lambda offers: SplitStep(self, offers).run(),
        )
        return outcome

    def rounds(self, table: RowTable, device: torch.device) -> Rounds:
        """How closely each slot's threshold is looked for."""
        exact = self.threshold == "exact"
        return Rounds([EXACT if exact else rounds_for(rows.entries) for rows in table.rows], device)


class SplitStep:
    """One exchange of one group, phase by phase, for the ranks that are here: one, or neighbouring virtual ones.

    All tensors but those that are the same on all ranks begin with a dimension of ranks.
    """

    def __init__(self, setting: SplitReduce, offers: Sequence[Offer]) -> None:
        self.setting = setting
        self.offers = offers
        first = offers[0]
        self.phase = first.phase
        self.rank, self.world = first.place.rank, first.place.world
        self.wire = wire_dtype(first)
        self.sum_dtype, self.device = first.account.c.dtype, first.account.c.device
        self.table = first.codec.table
        world, device = self.world, self.device
        self.regions = remembered(
            self.table,
            ("hashed", world, device),
            lambda: HashedRegions(self.table, world, device),
        )
        self.places = remembered(
            self.table,
            ("places", world, setting.capacity, device),
            lambda: Places(self.table, self.regions, world, setting.capacity),
        )
        self.slots = self.table.entry_slots(device)

    def run(self) -> TeamProgram[Sequence[Outcome]]:
        full = self.setting.contribution == "full"
        values, positions = self.select()
        wire = to_wire(values, self.wire)
        proposal = propose(wire, *self.regions.locate(positions, self.slots), self.places)
        sent = torch.where(proposal.placed, wire, 0.0).to(self.sum_dtype)
        if not full:
            for which, offer in enumerate(self.offers):
                offer.account.write_off(positions[which], sent[which], held=values[which])
        arrived, flags = yield from self.send(proposal, sent)
        used, non_finite = read_flags(flags)
        owned = reduce_arrived(arrived, self.places, self.wire, self.sum_dtype)
        # A slot that no rank had a gradient for keeps nothing.
        fit = yield from self.choose(owned, used * self.places.entries)
        if full:
            outcomes = yield from self.contribute(fit)
            return [replace(one, non_finite=one.non_finite | non_finite) for one in outcomes]
        update, kept = yield from self.gather(owned, fit)
        lost = torch.where(kept[positions], 0.0, sent)
        non_finite = non_finite | any_non_finite(update)
        counts = self.count(sent)
        for which, offer in enumerate(self.offers):
            offer.account.give_back(positions[which], lost[which])
        return [Outcome(update, non_finite, sent=counts[which]) for which in range(len(sent))]

    def select(self) -> tuple[Tensor, Tensor]:
        """Values and flat positions [ranks, entries]."""
        selector, ranks = self.offers[0].selector, len(self.offers)
        if selector is None or ranks == 1:
            picks = [offer.pick() for offer in self.offers]
            values = torch.stack([one.values for one in picks])
            return values, self.table.positions(torch.stack([one.indices for one in picks]))
        c = torch.cat([offer.account.c for offer in self.offers])
        tables = remembered(self.table, ("repeated", ranks), lambda: repeat(self.table, ranks))
        chosen = selector.pick(c, tables)
        return chosen.values.view(ranks, -1), self.table.positions(chosen.indices.view(ranks, -1))

    def send(self, proposal: Proposal, sent: Tensor) -> TeamProgram[tuple[Tensor, Tensor]]:
        """(what arrives [ranks, world, bytes], flags of all ranks): every entry goes to its owner."""
        messages = pack(proposal.indices, proposal.values)
        padding = self.travelling_padding((proposal.indices < 0).sum(2))
        flags = flags_requests(self.offers, any_non_finite(sent))
        phase = f"{self.phase}/split"
        replies = yield [
            (flag, AllToAll(message, phase, padding_bytes=empty))
            for flag, message, empty in zip(flags, messages, padding, strict=True)
        ]
        return torch.stack([arrived for _, arrived in replies]), replies[0][0]

    def travelling_padding(self, empty: Tensor) -> Tensor:
        """Bytes of [ranks, world] empty places as the `padding_bytes` of an all-to-all, whose own row stays at home."""
        world, entry = self.world, INDEX_BYTES + self.wire.itemsize
        ranks = range(self.rank, self.rank + len(self.offers))

        def weigh() -> Tensor:
            others = 1 - torch.eye(world, dtype=torch.float64)[ranks.start : ranks.stop]
            return (others * (entry * world / (world - 1))).to(self.device)

        weights = remembered(self.table, ("padding", world, entry, ranks, self.device), weigh)
        return (empty * weights).sum(1)

    def choose(self, owned: Owned, keep: Tensor) -> TeamProgram[Tensor]:
        """int32 [ranks, places]: the `keep` largest sums of every slot, by index in the owner's region."""
        setting, segments = self.setting, Segments(self.regions.edges)
        rounds = remembered(
            self.table,
            ("rounds", setting.threshold, self.device),
            lambda: setting.rounds(self.table, self.device),
        )
        candidates = Candidates(magnitude_bits(owned.sums[:, 1:]), owned.touched[:, 1:], segments)
        winners = yield from choose_largest(
            candidates, keep, rounds, rank=self.rank, phase=self.phase
        )
        return compact(winners, segments, self.places)

    def contribute(self, fit: Tensor) -> TeamProgram[Sequence[Outcome]]:
        """Gather all owners' winners; every rank's whole compensated gradient there is added."""
        empty = (fit < 0).sum(1) * INDEX_BYTES
        phase = f"{self.phase}/places"
        replies = yield [
            (AllGather(row, phase, padding_bytes=unused),)
            for row, unused in zip(fit.contiguous(), empty, strict=True)
        ]
        agreed = positions_of(replies[0][0], self.regions, self.places, NO_ENTRY)
        if not sums_by_owner(self.offers[0]):
            agreed = pack_left(agreed.reshape(-1), self.table.entries)
        outcomes = yield from abreast([contribute(offer, agreed) for offer in self.offers])
        return outcomes

    def gather(self, owned: Owned, fit: Tensor) -> TeamProgram[tuple[Tensor, Tensor]]:
        """(mean of the winners, bool mask of their positions), for all ranks; an owner banks what rounding its sums
        lost."""
        # Empty places read the dump, which is zero.
        exact = owned.sums.gather(1, fit.long() + 1)
        rounded = to_wire(exact, self.wire)
        if self.wire != self.sum_dtype:
            self.bank(exact - rounded, fit)
        messages = pack(fit, rounded)
        empty = (fit < 0).sum(1) * (INDEX_BYTES + self.wire.itemsize)
        phase = f"{self.phase}/gather"
        replies = yield [
            (AllGather(message, phase, padding_bytes=unused),)
            for message, unused in zip(messages, empty, strict=True)
        ]
        (gathered,) = replies[0]
        return alike(gathered, lambda: self.read_winners(gathered))

    def bank(self, lost: Tensor, fit: Tensor) -> None:
        ranks = torch.arange(self.rank, self.rank + len(fit), device=self.device)[:, None]
        index = torch.maximum(fit, self.places.lowest)
        positions = self.regions.positions(ranks, index, self.places.lookup)
        lost = torch.where(lost.isfinite(), lost, 0.0)
        for which, offer in enumerate(self.offers):
            offer.account.give_back(positions[which], lost[which])

    def read_winners(self, gathered: Tensor) -> tuple[Tensor, Tensor]:
        places, numel = self.places, self.table.numel
        indices, values = unpack(gathered, self.wire, places.lowest, places.highest)
        # One element more than the group: the dump of empty places.
        positions = positions_of(indices, self.regions, places, numel).view(-1)
        kept = torch.zeros(numel + 1, dtype=torch.bool, device=self.device)
        kept.index_fill_(0, positions, True)
        update = torch.zeros(numel + 1, dtype=self.sum_dtype, device=self.device)
        update.index_add_(0, positions, values.reshape(-1).to(self.sum_dtype))
        return update[:-1].mul_(1 / self.world), kept[:-1]

    def count(self, sent: Tensor) -> Tensor:
        """int64 [ranks, slots]: entries that each rank sent."""
        counts = torch.zeros(len(sent), len(self.table.rows), dtype=torch.int64, device=self.device)
        return counts.scatter_add_(1, self.slots.long().expand_as(sent), (sent != 0).long())


def repeat(table: RowTable, times: int) -> RowTable:
    """The rows of as many groups that lie one behind the other."""
    numel = table.numel
    rows = [
        rows.at(rows.slot.at(turn * numel + rows.slot.offset))
        for turn in range(times)
        for rows in table.rows
    ]
    return RowTable(rows, times * numel)
