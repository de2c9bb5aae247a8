"""Split-and-reduce: a sparse reduce-scatter to owners, a global selection, and an all-gather of the winners.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (Ok-Topk, PPoPP'22). `SplitReduce` is
thinwire's form of it: every message has a size that shapes alone give, so that the volume is bounded on every step and
the host never waits. `reused.py` keeps the published form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.exchange.agreed import contribute, sums_by_owner
from thinwire.exchange.base import Exchange, Offer, Outcome
from thinwire.exchange.common import count_by_slot, keep_alone, read_flags, remembered
from thinwire.exchange.places import (
    LARGEST_CAPACITY,
    Owned,
    Places,
    compact,
    gather_places,
    gather_sums,
    pack_left,
    propose,
    reduce_split,
)
from thinwire.exchange.regions import HashedRegions
from thinwire.exchange.requests import Program
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
        full = self.contribution == "full"
        table, world = offer.codec.table, offer.place.world
        device = offer.account.c.device
        regions = remembered(
            table, ("hashed", world, device), lambda: HashedRegions(table, world, device)
        )
        places = remembered(
            table,
            ("places", world, self.capacity, device),
            lambda: Places(table, world, self.capacity, device),
        )
        proposal = propose(offer, regions, places)
        if not full:
            offer.account.write_off(proposal.positions, proposal.sent)
        owned, flags = yield from reduce_split(offer, regions, proposal)
        used, non_finite = read_flags(flags)
        segments = Segments(regions.edges)
        # A slot that no rank had a gradient for keeps nothing.
        winners = yield from self.select_winners(offer, segments, owned, used * places.entries)
        fit = compact(winners, segments, places)
        if full:
            agreed = yield from gather_places(offer, regions, fit)
            if not sums_by_owner(offer):
                agreed = pack_left(agreed.reshape(-1), table.entries)
            outcome = yield from contribute(offer, agreed)
            return replace(outcome, non_finite=outcome.non_finite | non_finite)
        update, kept = yield from gather_sums(offer, regions, owned, fit)
        lost = torch.where(kept[proposal.positions], 0.0, proposal.sent)
        offer.account.give_back(proposal.positions, lost)
        non_finite = non_finite | ~update.isfinite().all()
        counts = count_by_slot(proposal.sent != 0, table.entry_slots(device), table)
        return Outcome(update.mul_(1 / world), non_finite, sent=counts)

    def select_winners(
        self, offer: Offer, segments: Segments, owned: Owned, keep: Tensor
    ) -> Program[Tensor]:
        """The `keep` largest sums of every slot."""
        table, place, device = offer.codec.table, offer.place, keep.device
        rounds = remembered(
            table, ("rounds", self.threshold, device), lambda: self.rounds(table, device)
        )
        candidates = Candidates(magnitude_bits(owned.sums), owned.touched, segments)
        winners = yield from choose_largest(
            candidates, keep, rounds, world=place.world, rank=place.rank, phase=offer.phase
        )
        return winners

    def rounds(self, table: RowTable, device: torch.device) -> Rounds:
        """How closely each slot's threshold is looked for."""
        exact = self.threshold == "exact"
        return Rounds([EXACT if exact else rounds_for(rows.entries) for rows in table.rows], device)
