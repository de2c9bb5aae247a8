"""Split-and-reduce: a sparse reduce-scatter to owners, and an all-gather of the largest sums.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (Ok-Topk, PPoPP'22). `SplitReduce` is
thinwire's form of it: every message has a size that shapes alone give, so that the volume is bounded on every step and
the host never waits. `reused.py` keeps the published form.
"""

from __future__ import annotations

import math
import zlib
from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.errors import UsageError
from thinwire.exchange.agreed import contribute, sums_by_owner
from thinwire.exchange.base import Exchange, Offer, Outcome
from thinwire.exchange.common import (
    NO_ENTRY,
    any_non_finite,
    count_by_slot,
    keep_alone,
    to_wire,
    travelling,
    wire_dtype,
)
from thinwire.exchange.exclusive import share
from thinwire.exchange.places import (
    INDEX_BYTES,
    Places,
    Proposal,
    Winners,
    add_arrived,
    all_win,
    choose_winners,
    largest_sums,
    pack,
    pack_left,
    positions_of,
    propose,
    split,
    unpack,
)
from thinwire.exchange.regions import HashedRegions
from thinwire.exchange.requests import AllToAll, Gather, Place, Program, common
from thinwire.layout import RowTable, remembered
from thinwire.validate import check_choice, check_finite_number

SPLIT_ENTRIES = "entries that Offer.pick chose, added by the owners of hashed regions"
"""The form of an `OwnedSums`."""
Contribution = Literal["selected", "full"]
LARGEST_CAPACITY = 1.5
"""Beyond it a `SplitReduce` no longer stays within 6k(P-1)/P words."""


@dataclass(frozen=True, kw_only=True)
class OwnedSums(Exchange):
    """Entries travel to owners, and their sums back, in messages of sizes that shapes alone give."""

    capacity: float = 1.25
    """Places per slot and owner, as a multiple of k/P."""

    computed_by = ("run", "step", "places", "winners")
    sums_on_the_way = True

    def __post_init__(self) -> None:
        check_finite_number("capacity", self.capacity)
        if not 1.0 <= self.capacity <= LARGEST_CAPACITY:
            raise UsageError(
                f"capacity is {self.capacity!r}; it must be between 1 and {LARGEST_CAPACITY}"
            )

    def run(self, offer: Offer) -> Program[Outcome]:
        if offer.place.world == 1:
            return keep_alone(offer)
        outcome = yield from self.step(offer).run()
        return outcome

    @abstractmethod
    def step(self, offer: Offer) -> SplitStep:
        """One exchange among several ranks."""

    def places(self, table: RowTable, regions: HashedRegions, world: int) -> tuple[Places, Places]:
        """(of what travels to the owners, of the sums that come back)."""
        rooms = [capacity_of(rows.entries, world, self.capacity) for rows in table.rows]
        places = Places(regions, rooms, world)
        return places, places

    def winners(self, table: RowTable) -> list[int] | None:
        """By slot: how many of the sums that come back are kept, the largest. None: all of them."""
        return [rows.entries for rows in table.rows]

    def objection_to_kernels(self, table: RowTable, world: int) -> str | None:
        """What a step is beside that in such a group, as the end of a sentence; None if that is all."""
        return None


@dataclass(frozen=True, kw_only=True)
class SplitReduce(OwnedSums):
    """Ok-Topk with an exact choice and a hard bound: at most 6k(P-1)/P words on every step (from P entries per slot on).

    1. Select locally.
    2. Send each entry to the owner of its place, at most `capacity` x k/P per slot and owner, largest first; the rest
       stays in memory. A message is in the order of the entries.
    3. Owners add what arrived, in rank order.
    4. Each owner's `capacity` x k/P largest sums of every slot are gathered, ties to the lowest index, by rising index. The places
       were there for the winners anyway; that all are filled saves the rounds in which owners would have to agree on a threshold.
    5. The k largest of each slot's gathered sums win, on every rank alike, ties to the lowest owner, then to the lowest index.
    6. What was sent and did not win returns to memory.

    `contribution="full"`: owners keep the k/P largest sums each, only the winners' places are gathered, and every rank's whole
    compensated gradient there is added by an all-reduce: better contraction for about one word more per entry.
    """

    contribution: Contribution = "selected"
    """What a rank adds at a winner's place: what it selected there, or "full": all it has there."""

    form = SPLIT_ENTRIES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("contribution", self.contribution, ("selected", "full"))

    def entry_bits(self, value_bits: float, index_bits: float, world: int) -> float:
        split = self.capacity * (32 + value_bits)
        back = 32 + 2 * value_bits if self.contribution == "full" else split
        return (split + back) * (world - 1) / world

    @property
    def gathered_after(self) -> int | None:
        return None if self.contribution == "full" else 1

    def objection_to_kernels(self, table: RowTable, world: int) -> str | None:
        return "contribution='full'" if self.contribution == "full" else None

    def step(self, offer: Offer) -> SplitStep:
        return SplitStep(self, offer, full=self.contribution == "full")


def capacity_of(entries: int, world: int, capacity: float) -> int:
    """capacity x k/P rounded up, but never beyond 1.5 k/P: two messages of it then stay within 6k(P-1)/P words."""
    wanted = math.ceil(capacity * entries / world)
    return min(wanted, max(1, math.floor(LARGEST_CAPACITY * entries / world)))


class SplitLayout:
    """Who owns what of a group, and what the messages of a step look like. The same in every step."""

    def __init__(
        self,
        setting: OwnedSums,
        table: RowTable,
        wire: torch.dtype,
        place: Place,
        device: torch.device,
        phase: str = "sparse",
    ) -> None:
        self.table, self.wire, self.phase = table, wire, phase
        self.world = world = place.world
        self.entry_bytes = INDEX_BYTES + wire.itemsize
        self.regions = remembered(
            table, ("hashed", world, device), lambda: HashedRegions(table, world, device)
        )
        self.places, self.back = remembered(
            table,
            ("places", setting, world, device),
            lambda: setting.places(table, self.regions, world),
        )
        self.winners = setting.winners(table)

    def deal_out(self, messages: Tensor, head: int, padding: Tensor) -> Program[Tensor]:
        """What the ranks have for this owner [world, bytes], given what this rank has for each, in front `head` bytes of flags."""
        request = AllToAll(
            messages,
            f"{self.phase}/split",
            control_bytes=head * self.world,
            padding_bytes=padding,
            apart=True,
        )
        (arrived,) = yield (request,)
        return arrived

    def gather(self, message: Tensor, padding: Tensor) -> Program[Tensor]:
        """All owners' sums [world, bytes], given this one's."""
        request = Gather(message, f"{self.phase}/gather", padding_bytes=padding, apart=True)
        (gathered,) = yield (request,)
        return gathered

    @property
    def spare(self) -> float:
        """Winners are spread evenly over the owners on average: an owner's places that hold none."""
        return 0.0 if self.winners is None else self.back.total - sum(self.winners) / self.world

    def read(
        self, entries: Tensor, places: Places, owner: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """(flat positions, float32 values, 0 in empty places) of messages [owners, bytes] without flags, or of one owner's."""
        indices, values = split(entries, self.wire)
        owners = places.owners if owner is None else places.owners[owner]
        inside = torch.maximum(indices, places.lowest)
        positions = self.regions.positions(owners, inside, places.lookup)
        return positions.view(-1), torch.where(indices >= 0, values.float(), 0.0).view(-1)


class SplitStep:
    """One exchange of one group, phase by phase."""

    def __init__(self, setting: OwnedSums, offer: Offer, *, full: bool = False) -> None:
        self.offer, self.full = offer, full
        self.phase = offer.phase
        self.rank, self.world = offer.place.rank, offer.place.world
        self.wire = wire_dtype(offer)
        self.sum_dtype, self.device = offer.account.c.dtype, offer.account.c.device
        self.table = offer.codec.table
        layout = (self.table, self.wire, offer.place, self.device, offer.phase)
        self.layout = SplitLayout(setting, *layout)
        self.regions, self.places = self.layout.regions, self.layout.places
        self.back = self.layout.back
        self.slots = self.table.entry_slots(self.device)

    def run(self) -> Program[Outcome]:
        account = self.offer.account
        picks = self.offer.pick()
        positions = self.table.positions(picks.indices)
        wire = to_wire(picks.values, self.wire)
        proposal = propose(wire, *self.regions.locate(positions, self.slots), self.places)
        sent = torch.where(proposal.placed, wire, 0.0).to(self.sum_dtype)
        if not self.full:
            account.write_off(positions, sent, held=picks.values)
        arrived, used, non_finite = yield from self.send(proposal, any_non_finite(picks.values))
        indices, values = unpack(arrived, self.wire, self.places.lowest, self.places.highest)
        sums = add_arrived(indices, values, self.regions.size, self.sum_dtype)
        if self.full:
            outcome: Outcome = yield from self.contribute(sums, indices, used, non_finite)
            return outcome
        update, kept, bad = yield from self.gather(sums, indices, used)
        account.give_back(positions, torch.where(kept[positions], 0.0, sent))
        counts = count_by_slot(sent != 0, self.slots, self.table)
        return Outcome(update, non_finite | bad, sent=counts)

    def send(self, proposal: Proposal, bad: Tensor) -> Program[tuple[Tensor, Tensor, Tensor]]:
        """(entries that arrive [world, bytes], slots some rank had a gradient for, whether anything was not finite).

        Every entry goes to its owner. Before them are this rank's flags, one byte each.
        """
        flags = self.offer.flags
        words = torch.cat([(flags.non_finite | bad)[None], flags.had_gradient]).to(torch.uint8)
        words = pad(words, (0, -len(words) % 4))
        entries = pack(proposal.indices, proposal.values)
        empty = (proposal.indices < 0).sum(1) * self.layout.entry_bytes
        message = torch.cat([words.expand(self.world, -1), entries], 1)
        padding = travelling(empty, self.rank)
        arrived = yield from self.layout.deal_out(message, words.nbytes, padding)
        raised = arrived[:, : len(words)].amax(0) > 0
        return arrived[:, len(words) :], raised[1 : 1 + len(self.table.rows)], raised[0]

    def gather(
        self, sums: Tensor, indices: Tensor, used: Tensor
    ) -> Program[tuple[Tensor, Tensor, Tensor]]:
        """(mean of the winners, mask of their positions, whether one is not finite); an owner banks what rounding its sums lost."""
        fit = largest_sums(sums, indices, self.places, self.back)
        # Empty places read the dump, which is zero.
        exact = sums[fit.long() + 1]
        rounded = to_wire(exact, self.wire)
        layout = self.layout
        padding = (fit < 0).sum().clamp(min=layout.spare) * layout.entry_bytes
        gathered = yield from layout.gather(pack(fit, rounded), padding)
        update, kept, won, bad = yield from common(lambda: self.read(gathered, used))
        if self.wire != self.sum_dtype:
            self.bank(torch.where(won[self.rank], exact - rounded, 0.0), fit)
        return update, kept, bad

    def read(self, gathered: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(mean of the winners, mask of their positions, mask [world, places] of theirs, whether one is not finite)."""
        winners = self.winners(gathered, used)
        numel, width = self.table.numel, self.back.total
        # One element more than the group: the dump of what is not kept.
        kept = torch.zeros(numel + 1, dtype=torch.bool, device=self.device)
        kept.index_fill_(0, winners.positions, True)
        won = torch.zeros(self.world * width + 1, dtype=torch.bool, device=self.device)
        won.index_fill_(0, winners.places, True)
        update = torch.zeros(numel + 1, dtype=self.sum_dtype, device=self.device)
        means = winners.values.to(self.sum_dtype) * (1 / self.world)
        update.scatter_(0, winners.positions, means)
        bad = any_non_finite(means)
        return update[:-1], kept[:-1], won[:-1].view(self.world, width), bad

    def winners(self, gathered: Tensor, used: Tensor) -> Winners:
        back, winners = self.back, self.layout.winners
        indices, values = unpack(gathered, self.wire, back.lowest, back.highest)
        # A slot that no rank had a gradient for keeps nothing.
        if winners is None:
            return all_win(
                torch.where(used[back.slots], indices, NO_ENTRY), values, back, self.table.numel
            )
        slots, turns = remembered(
            self.table,
            ("winners", self.world, back.total, self.device),
            lambda: self.winning_turns(torch.tensor(winners)),
        )
        turns = torch.where(used[slots], turns, -1)
        return choose_winners(indices, values, back, slots, turns, self.table.numel)

    def winning_turns(self, keep: Tensor) -> tuple[Tensor, Tensor]:
        """(the slot of every winner, how many of its slot are before it), if each keeps so many."""
        slots = torch.arange(len(keep)).repeat_interleave(keep)
        turns = torch.arange(len(slots)) - (keep.cumsum(0) - keep)[slots]
        return slots.to(self.device), turns.to(self.device)

    def bank(self, lost: Tensor, fit: Tensor) -> None:
        back = self.back
        index = torch.maximum(fit, back.lowest)
        positions = self.regions.positions(back.owners[self.rank], index, back.lookup)
        self.offer.account.give_back(positions, torch.where(lost.isfinite(), lost, 0.0))

    def contribute(
        self, sums: Tensor, indices: Tensor, used: Tensor, non_finite: Tensor
    ) -> Program[Outcome]:
        """Gather all owners' winners; every rank's whole compensated gradient there is added."""
        places, shares = self.shares()
        fit = largest_sums(sums, indices, self.places, places)
        fit = torch.where(places.turns < (used * shares)[places.slots], fit, NO_ENTRY)
        empty = (fit < 0).sum() * INDEX_BYTES
        (gathered,) = yield (Gather(fit, f"{self.phase}/places", padding_bytes=empty),)
        agreed = positions_of(gathered, places, NO_ENTRY)
        if not sums_by_owner(self.offer):
            agreed = pack_left(agreed.reshape(-1), self.table.entries)
        outcome = yield from contribute(self.offer, agreed, (used, non_finite))
        return outcome

    def shares(self) -> tuple[Places, Tensor]:
        """(places for k/P winners per slot and owner, how many of them this owner may take now).

        Owners take turns where k is no multiple of P, so that nobody always goes without.
        """
        table, world, device = self.table, self.world, self.device
        places = remembered(
            table,
            ("share places", world, device),
            lambda: Places(self.regions, [-(-r.entries // world) for r in table.rows], world),
        )
        counts = self.offer.counts or [0] * len(table.rows)
        turns = tuple(
            (zlib.crc32(rows.slot.name.encode()) + count + self.rank) % world
            for rows, count in zip(table.rows, counts, strict=True)
        )

        def make() -> Tensor:
            spans = [share(r.entries, t, world) for r, t in zip(table.rows, turns, strict=True)]
            return torch.tensor([stop - start for start, stop in spans], device=device)

        return places, remembered(table, ("shares", turns, device), make)
