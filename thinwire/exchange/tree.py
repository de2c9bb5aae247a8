"""gTopk: a binomial tree of merges that keeps k entries at every merge.

Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks" (ICDCS'19).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.exchange.base import Exchange, Offer, Outcome
from thinwire.exchange.common import (
    INDEX_DTYPE,
    NO_ENTRY,
    count_by_slot,
    flags_request,
    keep_alone,
    read_flags,
    slot_of,
    to_wire,
    typed,
    wire_dtype,
    zero_update,
)
from thinwire.exchange.places import INDEX_BYTES, pack, unpack
from thinwire.exchange.requests import Program, Swap
from thinwire.exchange.uneven import Entries, add_up
from thinwire.select.rows import RowTable
from thinwire.validate import check_bool


@dataclass(frozen=True, kw_only=True)
class TreeMerge(Exchange):
    """gTopk. 4k log P words along the longest path.

    1. In round q every rank that is a multiple of 2^(q+1) receives k entries from the rank 2^q above it, adds equal places
       and keeps the k largest of every slot.
    2. Rank 0's list travels down the same tree.

    As published (`conserve=False`) a rank takes back what it selected and does not find in the final list. That loses a
    contribution dropped at an inner merge if its place wins elsewhere: lossy by design. With `conserve=True` a rank clears
    everything it handed over, and whoever drops a partial sum in a merge keeps it in its own memory: nothing is lost.
    """

    conserve: bool = True

    sums_on_the_way = True
    host_sync_free = False

    def __post_init__(self) -> None:
        check_bool("conserve", self.conserve)

    def entry_bits(self, value_bits: float, index_bits: float, world: int) -> float:
        return 2 * (32 + value_bits) * max(1, (world - 1).bit_length())

    def run(self, offer: Offer) -> Program[Outcome]:
        if offer.place.world == 1:
            return keep_alone(offer)
        table, account = offer.codec.table, offer.account
        picks = offer.pick()
        positions = table.positions(picks.indices)
        slots = table.entry_slots(positions.device).long()
        (flags,) = yield (flags_request(offer, ~picks.values.isfinite().all()),)
        used, non_finite = read_flags(flags)
        sent = torch.where(used[slots], to_wire(picks.values, wire_dtype(offer)), 0.0)
        chosen = sent != 0
        sent = sent.to(account.c.dtype)
        account.write_off(positions, sent)
        mine = Entries(positions[chosen], sent[chosen])
        merged = yield from self.merge_up(offer, mine)
        final = yield from send_down(offer, merged)
        update = zero_update(offer)
        update[final.positions] = final.values.to(update.dtype)
        if not self.conserve:
            kept = torch.zeros(table.numel, dtype=torch.bool, device=update.device)
            kept[final.positions] = True
            account.give_back(positions, torch.where(kept[positions], 0.0, sent))
        non_finite = non_finite | ~update.isfinite().all()
        counts = count_by_slot(chosen, slots, table)
        return Outcome(update.mul_(1 / offer.place.world), non_finite, sent=counts)

    def merge_up(self, offer: Offer, mine: Entries) -> Program[Entries]:
        """On rank 0 the final list, as the wire rounds it."""
        rank, world = offer.place.rank, offer.place.world
        reach = 1
        while reach < world:
            sends = rank % (2 * reach) == reach
            receives = rank % (2 * reach) == 0 and rank + reach < world
            message = empty_message(offer)
            if sends:
                message = fill_message(offer, self.round(offer, mine))
            request = Swap(
                message,
                f"{offer.phase}/merge",
                padding_bytes=padding_of(message, offer),
                to=rank - reach if sends else None,
                source=rank + reach if receives else None,
            )
            (arrived,) = yield (request,)
            if receives:
                theirs = read_message(offer, arrived)
                mine = self.keep_largest(offer, mine, theirs)
            reach *= 2
        return self.round(offer, mine) if rank == 0 else mine

    def round(self, offer: Offer, entries: Entries) -> Entries:
        """Entries as the wire rounds them; what is lost stays in this rank's memory."""
        rounded = to_wire(entries.values, wire_dtype(offer))
        lost = entries.values - rounded
        offer.account.give_back(entries.positions, torch.where(lost.isfinite(), lost, 0.0))
        return Entries(entries.positions, rounded)

    def keep_largest(self, offer: Offer, mine: Entries, theirs: Entries) -> Entries:
        """Add equal places, keep each slot's largest, ties to the lowest position."""
        both = Entries(
            torch.cat([mine.positions, theirs.positions]),
            torch.cat([mine.values, theirs.values.to(mine.values.dtype)]),
        )
        sums = add_up(both, mine.values.dtype)
        kept = largest_per_slot(sums, offer.codec.table)
        if self.conserve:
            dropped = sums.at(~kept)
            offer.account.give_back(dropped.positions, dropped.values)
        return sums.at(kept)


def largest_per_slot(sums: Entries, table: RowTable) -> Tensor:
    """bool: the k largest of each slot, so that the result is the same in every bucketing."""
    slots = slot_of(sums.positions, table)
    order = sums.values.abs().sort(descending=True, stable=True).indices
    order = order[slots[order].sort(stable=True).indices]
    counts = count_by_slot(torch.ones_like(slots), slots, table)
    turn = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[slots[order]]
    keep = torch.tensor([rows.entries for rows in table.rows], device=order.device)
    return torch.zeros_like(slots, dtype=torch.bool).scatter_(0, order, turn < keep[slots[order]])


def send_down(offer: Offer, final: Entries) -> Program[Entries]:
    """Rank 0's list on every rank, along the same tree."""
    rank, world = offer.place.rank, offer.place.world
    reach = 1 << max(0, (world - 1).bit_length() - 1)
    message = fill_message(offer, final) if rank == 0 else empty_message(offer)
    while reach:
        sends = rank % (2 * reach) == 0 and rank + reach < world
        receives = rank % (2 * reach) == reach
        request = Swap(
            message,
            f"{offer.phase}/spread",
            padding_bytes=padding_of(message, offer),
            to=rank + reach if sends else None,
            source=rank - reach if receives else None,
        )
        (arrived,) = yield (request,)
        if receives:
            message = arrived
        reach //= 2
    return read_message(offer, message)


def empty_message(offer: Offer) -> Tensor:
    """k places without an entry."""
    keep = offer.codec.table.entries
    device = offer.account.c.device
    indices = torch.full((1, keep), NO_ENTRY, dtype=INDEX_DTYPE, device=device)
    return pack(indices, torch.zeros(1, keep, dtype=wire_dtype(offer), device=device))


def fill_message(offer: Offer, entries: Entries) -> Tensor:
    keep = offer.codec.table.entries
    device = offer.account.c.device
    indices = torch.full((1, keep), NO_ENTRY, dtype=INDEX_DTYPE, device=device)
    values = torch.zeros(1, keep, dtype=wire_dtype(offer), device=device)
    count = len(entries.positions)
    indices[0, :count] = entries.positions.to(INDEX_DTYPE)
    values[0, :count] = entries.values
    return pack(indices, values)


def read_message(offer: Offer, message: Tensor) -> Entries:
    indices, values = unpack(message, wire_dtype(offer), 0, offer.codec.table.numel - 1)
    taken = indices[0] >= 0
    return Entries(indices[0][taken].long(), values[0][taken])


def padding_of(message: Tensor, offer: Offer) -> Tensor:
    keep = offer.codec.table.entries
    indices = typed(message[:, : INDEX_BYTES * keep], INDEX_DTYPE)
    return (indices < 0).sum() * (INDEX_BYTES + wire_dtype(offer).itemsize)
