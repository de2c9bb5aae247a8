"""gTopk: a binomial tree of merges that keeps k entries at every merge.

Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks" (ICDCS'19).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.exchange.base import PICKED_ENTRIES, Exchange, Offer, Outcome
from thinwire.exchange.common import (
    INDEX_DTYPE,
    NO_ENTRY,
    count_by_slot,
    deliver_mean,
    flags_request,
    keep_alone,
    read_flags,
    slot_of,
    to_wire,
    typed,
    wire_dtype,
)
from thinwire.exchange.places import INDEX_BYTES, largest_by_slot, pack, unpack
from thinwire.exchange.requests import Program, Swap
from thinwire.layout import RowTable, remembered
from thinwire.validate import check_bool


@dataclass(frozen=True, eq=False)
class Listed:
    """As many places as a group may keep entries, those of a slot side by side: flat positions (int64, NO_ENTRY where there
    is none) and values."""

    positions: Tensor
    values: Tensor


class Bounds:
    """What shapes tell of the places of a list."""

    def __init__(self, table: RowTable, device: torch.device) -> None:
        starts = [rows.slot.offset for rows in table.rows]
        stops = [rows.slot.offset + rows.slot.numel for rows in table.rows]
        self.slots = table.entry_slots(device).long()
        self.turns = table.entry_places(device).long()
        """How many places of its slot are before each."""
        self.lowest = torch.tensor(starts, dtype=INDEX_DTYPE, device=device)[self.slots]
        self.highest = torch.tensor(stops, dtype=INDEX_DTYPE, device=device)[self.slots] - 1


def bounds_of(offer: Offer) -> Bounds:
    table, device = offer.codec.table, offer.account.c.device
    return remembered(table, ("bounds", device), lambda: Bounds(table, device))


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
    """Whether sums that a merge drops are kept in memory, so that nothing is lost."""

    form = PICKED_ENTRIES
    sums_on_the_way = True

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
        mine = Listed(torch.where(chosen, positions, NO_ENTRY), sent)
        merged = yield from self.merge_up(offer, mine)
        final = yield from send_down(offer, merged)
        if not self.conserve:
            # One element more than the group: the dump of empty places.
            kept = torch.zeros(table.numel + 1, dtype=torch.bool, device=positions.device)
            target = torch.where(final.positions >= 0, final.positions, table.numel)
            kept.index_fill_(0, target, True)
            account.give_back(positions, torch.where(kept[positions], 0.0, sent))
        counts = count_by_slot(chosen, slots, table)
        return deliver_mean(offer, final.positions, final.values, non_finite, counts)

    def merge_up(self, offer: Offer, mine: Listed) -> Program[Listed]:
        """On rank 0 the final list, as the wire rounds it."""
        rank, world = offer.place.rank, offer.place.world
        reach = 1
        while reach < world:
            sends = rank % (2 * reach) == reach
            receives = rank % (2 * reach) == 0 and rank + reach < world
            message = empty_message(offer)
            if sends:
                message = write_message(self.round(offer, mine))
            request = Swap(
                message,
                f"{offer.phase}/merge",
                padding_bytes=padding_of(message, offer),
                to=rank - reach if sends else None,
                source=rank + reach if receives else None,
                pattern=f"up {reach}",
            )
            (arrived,) = yield (request,)
            if receives:
                theirs = read_message(offer, arrived)
                mine = self.keep_largest(offer, mine, theirs)
            reach *= 2
        return self.round(offer, mine) if rank == 0 else mine

    def round(self, offer: Offer, entries: Listed) -> Listed:
        """Entries as the wire rounds them; what is lost stays in this rank's memory."""
        rounded = to_wire(entries.values, wire_dtype(offer))
        lost = entries.values - rounded
        lost = torch.where(lost.isfinite(), lost, 0.0)
        offer.account.give_back(entries.positions.clamp(min=0), lost)
        return Listed(entries.positions, rounded)

    def keep_largest(self, offer: Offer, mine: Listed, theirs: Listed) -> Listed:
        """Add equal places, keep each slot's largest, ties to the lowest position."""
        positions = torch.cat([mine.positions, theirs.positions])
        positions, order = positions.sort(stable=True)
        values = torch.cat([mine.values, theirs.values.to(mine.values.dtype)])[order]
        # A place is there twice at most, this rank's first.
        twice = positions[1:] == positions[:-1]
        first = positions >= 0
        first[1:] &= ~twice
        sums = values.clone()
        sums[:-1] += torch.where(twice, values[1:], 0.0)
        bounds = bounds_of(offer)
        slot = slot_of(positions.clamp(min=0), offer.codec.table)
        kept, there = largest_by_slot(sums, first, slot, bounds.slots, bounds.turns)
        if self.conserve:
            dropped = torch.cat([first, first[:1]])
            # The last element is the dump of places that nobody takes.
            dropped = dropped.index_fill_(0, torch.where(there, kept, len(first)), False)[:-1]
            given = torch.where(dropped, sums, 0.0)
            offer.account.give_back(positions.clamp(min=0), given)
        return Listed(
            torch.where(there, positions[kept], NO_ENTRY), torch.where(there, sums[kept], 0.0)
        )


def send_down(offer: Offer, final: Listed) -> Program[Listed]:
    """Rank 0's list on every rank, along the same tree."""
    rank, world = offer.place.rank, offer.place.world
    reach = 1 << max(0, (world - 1).bit_length() - 1)
    message = write_message(final) if rank == 0 else empty_message(offer)
    while reach:
        sends = rank % (2 * reach) == 0 and rank + reach < world
        receives = rank % (2 * reach) == reach
        request = Swap(
            message,
            f"{offer.phase}/spread",
            padding_bytes=padding_of(message, offer),
            to=rank + reach if sends else None,
            source=rank - reach if receives else None,
            pattern=f"down {reach}",
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


def write_message(entries: Listed) -> Tensor:
    return pack(entries.positions.to(INDEX_DTYPE)[None], entries.values[None])


def read_message(offer: Offer, message: Tensor) -> Listed:
    bounds = bounds_of(offer)
    indices, values = unpack(message, wire_dtype(offer), bounds.lowest, bounds.highest)
    return Listed(indices[0].long(), values[0])


def padding_of(message: Tensor, offer: Offer) -> Tensor:
    keep = offer.codec.table.entries
    indices = typed(message[:, : INDEX_BYTES * keep], INDEX_DTYPE)
    return (indices < 0).sum() * (INDEX_BYTES + wire_dtype(offer).itemsize)
