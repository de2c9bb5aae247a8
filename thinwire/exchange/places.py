"""Messages of fixed size for split-and-reduce: so many places per slot and owner, whatever the data.

An entry is an int32 index inside the owner's region and a value in the wire's dtype. Places that no entry took hold
NO_ENTRY. Nothing here makes the host wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import WireError
from thinwire.exchange.base import Offer
from thinwire.exchange.common import (
    INDEX_DTYPE,
    NO_ENTRY,
    flags_request,
    to_wire,
    travelling,
    typed,
    wire_dtype,
    zero_update,
)
from thinwire.exchange.regions import HashedRegions
from thinwire.exchange.requests import AllGather, AllToAll, Program
from thinwire.exchange.segments import Segments
from thinwire.exchange.threshold import magnitude_bits
from thinwire.select.rows import RowTable

LARGEST_CAPACITY = 1.5
INDEX_BYTES = INDEX_DTYPE.itemsize


class Places:
    """How many places each slot has in a message to one owner, and where they begin."""

    def __init__(self, table: RowTable, world: int, capacity: float, device: torch.device) -> None:
        entries = [rows.entries for rows in table.rows]
        counts = [capacity_of(k, world, capacity) for k in entries]
        self.total = sum(counts)
        self.entries = torch.tensor(entries, device=device)
        """How many entries each slot may keep."""
        self.counts = torch.tensor(counts, device=device)
        self.starts = self.counts.cumsum(0) - self.counts


def capacity_of(entries: int, world: int, capacity: float) -> int:
    """capacity x k/P rounded up, but never beyond 1.5 k/P: two messages of it then stay within 6k(P-1)/P words."""
    wanted = math.ceil(capacity * entries / world)
    return min(wanted, max(1, math.floor(LARGEST_CAPACITY * entries / world)))


@dataclass(frozen=True, eq=False)
class Proposal:
    """This rank's selected entries, and those of them that found a place in a message."""

    positions: Tensor
    sent: Tensor
    """Values as the wire rounds them; 0 for entries without a place."""
    indices: Tensor
    """int32 [world, places]"""
    values: Tensor
    """wire dtype [world, places]"""


def propose(offer: Offer, regions: HashedRegions, places: Places) -> Proposal:
    """Sort the selected entries into messages, the largest of every slot and owner first."""
    table, world = offer.codec.table, offer.place.world
    picks = offer.pick()
    positions = table.positions(picks.indices)
    slots = table.entry_slots(positions.device).long()
    wire = to_wire(picks.values, wire_dtype(offer))
    owner, index = regions.place(positions, slots)
    boxes = world * len(table.rows)
    box = torch.where(wire != 0, owner * len(table.rows) + slots, boxes)
    # One key orders by box, then by falling magnitude, then (stable) by index.
    order = ((box << 31) | (0x7FFFFFFF - magnitude_bits(wire).long())).argsort(stable=True)
    box = box[order]
    sizes = torch.zeros(boxes + 1, dtype=torch.int64, device=box.device)
    sizes.scatter_add_(0, box, torch.ones_like(box))
    turn = torch.arange(box.numel(), device=box.device) - (sizes.cumsum(0) - sizes)[box]
    slot = slots[order]
    fits = (box < boxes) & (turn < places.counts[slot])
    target = owner[order] * places.total + places.starts[slot] + turn
    target = torch.where(fits, target, world * places.total)
    indices = torch.full(
        (world * places.total + 1,), NO_ENTRY, dtype=INDEX_DTYPE, device=box.device
    )
    values = torch.zeros(world * places.total + 1, dtype=wire.dtype, device=box.device)
    indices[target] = index[order].to(INDEX_DTYPE)
    values[target] = wire[order]
    placed = torch.zeros_like(fits).scatter_(0, order, fits)
    return Proposal(
        positions,
        torch.where(placed, wire, 0.0).to(offer.account.c.dtype),
        indices[:-1].view(world, -1),
        values[:-1].view(world, -1),
    )


@dataclass(frozen=True, eq=False)
class Owned:
    """What this rank holds of the sum: its region, and where anything arrived at all.

    A sum may be exactly zero and still be one, so `touched` is not `sums != 0`.
    """

    sums: Tensor
    touched: Tensor


def reduce_split(
    offer: Offer, regions: HashedRegions, proposal: Proposal
) -> Program[tuple[Owned, Tensor]]:
    """Send every entry to its owner; add what arrives, rank 0's first. Returns the flags of all ranks too."""
    message = pack(proposal.indices, proposal.values)
    entry = message.shape[1] // max(1, proposal.indices.shape[1])
    empty = (proposal.indices < 0).sum(1) * entry
    bad = ~proposal.sent.isfinite().all()
    request = AllToAll(
        message, f"{offer.phase}/split", padding_bytes=travelling(empty, offer.place.rank)
    )
    flags, arrived = yield flags_request(offer, bad), request
    indices, values = unpack(arrived, proposal.values.dtype, regions.size)
    # One element more than the region: the dump of empty places.
    sums = torch.zeros(regions.size + 1, dtype=offer.account.c.dtype, device=message.device)
    touched = torch.zeros(regions.size + 1, dtype=torch.bool, device=message.device)
    target = torch.where(indices >= 0, indices, regions.size)
    add_by_rank(sums, target, values)
    # Not `touched[...] = True`, which copies a number to the device and waits.
    touched.index_fill_(0, target.view(-1), True)
    return Owned(sums[:-1], touched[:-1]), flags


def add_by_rank(sums: Tensor, target: Tensor, values: Tensor) -> None:
    """sums[target] += values for [world, m] entries, row after row."""
    values = values.to(sums.dtype)
    if sums.device.type == "cpu":
        # index_add_ on the CPU goes from front to back, which is rank order.
        sums.index_add_(0, target.view(-1), values.reshape(-1))
        return
    for row, numbers in zip(target, values, strict=True):
        sums.index_add_(0, row, numbers)


def compact(winners: Tensor, segments: Segments, places: Places) -> Tensor:
    """int32 [places]: the indices of this owner's winners, in order, as many as each slot has places for."""
    turns, _ = segments.turns(winners)
    taken = winners & (turns <= segments.spread(places.counts))
    target = torch.where(taken, turns + segments.spread(places.starts - 1), places.total)
    fit = torch.full((places.total + 1,), NO_ENTRY, dtype=INDEX_DTYPE, device=winners.device)
    fit[target] = torch.arange(winners.numel(), dtype=INDEX_DTYPE, device=winners.device)
    return fit[:-1]


def gather_places(offer: Offer, regions: HashedRegions, fit: Tensor) -> Program[Tensor]:
    """[world, places]: flat positions of all owners' winners, NO_ENTRY where there is none."""
    empty = (fit < 0).sum() * INDEX_BYTES
    (indices,) = yield (AllGather(fit, f"{offer.phase}/places", padding_bytes=empty),)
    return positions_of(indices.long(), regions)


def gather_sums(
    offer: Offer, regions: HashedRegions, owned: Owned, fit: Tensor
) -> Program[tuple[Tensor, Tensor]]:
    """(dense sum of the winners, bool mask of their positions); an owner banks what rounding its sums lost."""
    won = fit >= 0
    index = fit.clamp(min=0).long()
    exact = torch.where(won, owned.sums[index], 0.0)
    rounded = to_wire(exact, wire_dtype(offer))
    lost = exact - rounded
    offer.account.give_back(
        regions.positions(offer.place.rank, index), torch.where(lost.isfinite(), lost, 0.0)
    )
    message = pack(fit[None], rounded[None])[0]
    empty = (~won).sum() * (INDEX_BYTES + rounded.element_size())
    (gathered,) = yield (AllGather(message, f"{offer.phase}/gather", padding_bytes=empty),)
    indices, values = unpack(gathered, rounded.dtype, regions.size)
    positions = positions_of(indices, regions).view(-1)
    numel = offer.codec.table.numel
    kept = torch.zeros(numel + 1, dtype=torch.bool, device=message.device)
    kept.index_fill_(0, torch.where(positions >= 0, positions, numel), True)
    sums = torch.where(positions >= 0, values.reshape(-1), 0.0).to(exact.dtype)
    update = zero_update(offer).index_add_(0, positions.clamp(min=0), sums)
    return update, kept[:-1]


def positions_of(indices: Tensor, regions: HashedRegions) -> Tensor:
    """Flat positions of [world, m] indices, row o in the region of owner o."""
    owners = torch.arange(indices.shape[0], device=indices.device)[:, None]
    return torch.where(indices >= 0, regions.positions(owners, indices.clamp(min=0)), NO_ENTRY)


def pack_left(places: Tensor, keep: int) -> Tensor:
    """The first `keep` places that are taken, in order, filled up with NO_ENTRY."""
    return places[(places < 0).to(torch.uint8).argsort(stable=True)[:keep]]


def pack(indices: Tensor, values: Tensor) -> Tensor:
    """[rows, m] indices and values as bytes, one message per row."""
    return torch.cat(
        [indices.contiguous().view(torch.uint8), values.contiguous().view(torch.uint8)], 1
    )


def unpack(message: Tensor, dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor]:
    """(int64 indices, values); an index beyond the region is refused, or on an accelerator marks the step as bad."""
    count = message.shape[1] // (INDEX_BYTES + dtype.itemsize)
    indices = typed(message[:, : INDEX_BYTES * count], INDEX_DTYPE).long()
    values = typed(message[:, INDEX_BYTES * count :], dtype)
    outside = (indices < NO_ENTRY) | (indices >= size)
    if message.device.type == "cpu":
        if bool(outside.any()):
            raise WireError("a message holds an index outside its owner's region")
        return indices, values
    return torch.where(outside, 0, indices), torch.where(outside, torch.nan, values)
