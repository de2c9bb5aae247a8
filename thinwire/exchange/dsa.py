"""TopkDSA: split and reduce, then gather every sum, or whole regions once there are too many.

Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning" (SC'19), in the form that Ok-Topk is
compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.exchange.base import PICKED_ENTRIES, Exchange, Offer, Outcome
from thinwire.exchange.common import (
    count_by_slot,
    deliver_mean,
    keep_alone,
    read_flags,
    slot_of,
    to_wire,
    wire_dtype,
    zero_update,
)
from thinwire.exchange.requests import Gather, Program
from thinwire.exchange.uneven import (
    Entries,
    count_everywhere,
    gather_entries,
    round_sums,
    send_to_owners,
)
from thinwire.validate import check_density


@dataclass(frozen=True, kw_only=True)
class SplitGather(Exchange):
    """Between 4k(P-1)/P words (all ranks chose the same places) and (2k + n)(P-1)/P (the regions went dense).

    1. Send each selected entry to the owner of its place; regions are an even split.
    2. Owners add in rank order.
    3. If the sums are fewer than `dense_above` x n they are gathered as entries, otherwise as whole regions.

    Everything that was sent is kept, so the update has up to P k entries.
    """

    dense_above: float = 1 / 3
    """Share of the elements from which on regions travel dense."""

    host_sync_free = False
    form = PICKED_ENTRIES
    sums_on_the_way = True

    def __post_init__(self) -> None:
        check_density("dense_above", self.dense_above)

    def entry_bits(self, value_bits: float, index_bits: float, world: int) -> float:
        return 2 * (32 + value_bits) * (world - 1) / world

    def run(self, offer: Offer) -> Program[Outcome]:
        if offer.place.world == 1:
            return keep_alone(offer)
        table, account, world = offer.codec.table, offer.account, offer.place.world
        picks = offer.pick()
        positions = table.positions(picks.indices)
        wire = to_wire(picks.values, wire_dtype(offer))
        sent = wire.to(account.c.dtype)
        account.write_off(positions, sent)
        share = -(-table.numel // world)
        bad = ~picks.values.isfinite().all()
        # Zeros stay at home: they would add nothing.
        owner = torch.where(wire != 0, positions // share, world)
        sums, flags = yield from send_to_owners(offer, Entries(positions, wire), owner, bad)
        used, non_finite = read_flags(flags)
        slots = table.entry_slots(positions.device).long()
        account.give_back(positions, torch.where(used[slots], 0.0, sent))
        sums = sums.at(used[slot_of(sums.positions, table)])
        rounded, lost = round_sums(offer, sums)
        account.give_back(sums.positions, lost)
        counts = yield from count_everywhere(offer, len(rounded.positions))
        entries = count_by_slot(wire != 0, slots, table)
        if sum(counts) < self.dense_above * table.numel:
            gathered = yield from gather_entries(offer, rounded, counts)
            return deliver_mean(offer, gathered.positions, gathered.values, non_finite, entries)
        update = yield from gather_regions(offer, rounded, share)
        non_finite = non_finite | ~update.isfinite().all()
        return Outcome(update.mul_(1 / world), non_finite, sent=entries)


def gather_regions(offer: Offer, sums: Entries, share: int) -> Program[Tensor]:
    """Everybody's region as plain numbers."""
    region = torch.zeros(share, dtype=sums.values.dtype, device=sums.values.device)
    region[sums.positions - offer.place.rank * share] = sums.values
    (gathered,) = yield (Gather(region, f"{offer.phase}/regions"),)
    update = zero_update(offer)
    return update.copy_(gathered.reshape(-1)[: update.numel()])
