"""Messages of fixed size for split-and-reduce: so many places per slot and owner, whatever the data.

An entry is an int32 index inside the owner's region and a value in the wire's dtype. Places that no entry took hold
NO_ENTRY. Nothing here makes the host wait. Tensors begin with a dimension of ranks: one, or all of a team.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import WireError
from thinwire.exchange.common import INDEX_DTYPE, NO_ENTRY, typed
from thinwire.exchange.regions import HashedRegions
from thinwire.exchange.segments import Segments
from thinwire.exchange.threshold import MAGNITUDE_BITS, magnitude_bits
from thinwire.select.rows import RowTable

LARGEST_CAPACITY = 1.5
INDEX_BYTES = INDEX_DTYPE.itemsize


class Places:
    """How many places each slot has in a message to one owner, and where they begin.

    The entries of one slot for one owner are a box.
    """

    def __init__(
        self, table: RowTable, regions: HashedRegions, world: int, capacity: float
    ) -> None:
        device = regions.device
        entries = [rows.entries for rows in table.rows]
        counts = torch.tensor([capacity_of(k, world, capacity) for k in entries])
        starts = counts.cumsum(0) - counts
        self.world = world
        self.total = int(counts.sum())
        self.size = regions.size
        self.entries = torch.tensor(entries, device=device)
        """How many entries each slot may keep."""
        self.starts = starts.to(device)
        self.stops = (starts + counts).to(device)
        firsts = (torch.arange(world)[:, None] * self.total + starts).view(-1)
        nowhere = torch.zeros(1, dtype=torch.int64)
        self.box_starts = torch.cat([firsts, nowhere]).to(device)
        """By box, and one more for what has no place: where it begins in all messages of a rank."""
        self.box_stops = torch.cat([firsts + counts.repeat(world), nowhere]).to(device)
        slots = torch.arange(len(entries)).repeat_interleave(counts).to(device)
        self.lookup = regions.lookup(slots)
        self.lowest = regions.edges.on_device[slots].to(INDEX_DTYPE)
        """By place: the smallest index that may be in it, and the largest."""
        self.highest = (regions.edges.on_device[slots + 1] - 1).to(INDEX_DTYPE)
        self.owners = torch.arange(world, device=device)[:, None]
        self._bounds: dict[int, Tensor] = {}

    def box_bounds(self, ranks: int) -> Tensor:
        """[ranks, boxes + 1]: the smallest key of every box."""
        if ranks not in self._bounds:
            boxes = torch.arange(self.box_starts.numel(), device=self.box_starts.device)
            self._bounds[ranks] = (boxes << MAGNITUDE_BITS).repeat(ranks, 1)
        return self._bounds[ranks]


def capacity_of(entries: int, world: int, capacity: float) -> int:
    """capacity x k/P rounded up, but never beyond 1.5 k/P: two messages of it then stay within 6k(P-1)/P words."""
    wanted = math.ceil(capacity * entries / world)
    return min(wanted, max(1, math.floor(LARGEST_CAPACITY * entries / world)))


@dataclass(frozen=True, eq=False)
class Proposal:
    """The ranks' selected entries, and those of them that found a place in a message."""

    placed: Tensor
    """bool [ranks, entries]"""
    indices: Tensor
    """int32 [ranks, world, places]"""
    values: Tensor
    """wire dtype [ranks, world, places]"""


def propose(wire: Tensor, box: Tensor, index: Tensor, places: Places) -> Proposal:
    """Sort selected entries [ranks, entries] into messages, the largest of every box first."""
    ranks, entries = wire.shape
    nowhere = places.box_starts.numel() - 1
    # One key orders by box, then by falling magnitude, then (stable) by index.
    ends = (torch.where(wire != 0, box, nowhere) << MAGNITUDE_BITS) + ((1 << MAGNITUDE_BITS) - 1)
    keys, order = (ends - magnitude_bits(wire)).sort(dim=1, stable=True)
    box = keys >> MAGNITUDE_BITS
    before = torch.searchsorted(keys, places.box_bounds(ranks))
    # Place of an entry = where its box begins + entries of the box before it.
    target = (places.box_starts - before).gather(1, box)
    target += torch.arange(entries, device=wire.device)
    dump = places.world * places.total
    target = torch.where(target < places.box_stops[box], target, dump)
    target = torch.empty_like(target).scatter_(1, order, target)
    shape = (ranks, dump + 1)
    indices = torch.full(shape, NO_ENTRY, dtype=INDEX_DTYPE, device=wire.device)
    indices.scatter_(1, target, index.to(INDEX_DTYPE))
    values = torch.zeros(shape, dtype=wire.dtype, device=wire.device).scatter_(1, target, wire)
    return Proposal(
        target < dump,
        indices[:, :-1].view(ranks, places.world, -1),
        values[:, :-1].view(ranks, places.world, -1),
    )


@dataclass(frozen=True, eq=False)
class Owned:
    """What ranks hold of the sum: [ranks, 1 + region], and where anything arrived at all. The first element, which is
    always zero, is the dump of empty places.

    A sum may be exactly zero and still be one, so `touched` is not `sums != 0`.
    """

    sums: Tensor
    touched: Tensor


def reduce_arrived(messages: Tensor, places: Places, wire: torch.dtype, sum_: torch.dtype) -> Owned:
    """Add what arrived at each rank, [ranks, world, bytes], rank 0's first."""
    ranks, width = messages.shape[0], places.size + 1
    indices, values = unpack(messages, wire, places.lowest, places.highest)
    begins = torch.arange(1, ranks * width, width, device=messages.device)[:, None, None]
    target = indices + begins
    sums = torch.zeros(ranks * width, dtype=sum_, device=messages.device)
    touched = torch.zeros(ranks * width, dtype=torch.bool, device=messages.device)
    add_by_rank(sums, target, values.to(sum_))
    # Not `touched[...] = True`, which copies a number to the device and waits.
    touched.index_fill_(0, target.view(-1), True)
    sums = sums.view(ranks, width)
    sums.select(1, 0).zero_()
    return Owned(sums, touched.view(ranks, width))


def add_by_rank(sums: Tensor, target: Tensor, values: Tensor) -> None:
    """sums[target] += values for [owners, world, m] entries, for each owner those of rank 0 first."""
    if sums.device.type == "cpu":
        # index_add_ on the CPU goes from front to back, which is rank order.
        sums.index_add_(0, target.view(-1), values.reshape(-1))
        return
    by_source = zip(target.unbind(1), values.unbind(1), strict=True)
    for row, numbers in by_source:
        sums.index_add_(0, row.reshape(-1), numbers.reshape(-1))


def compact(winners: Tensor, segments: Segments, places: Places) -> Tensor:
    """int32 [ranks, places]: the indices of each owner's winners, in order, as many as each slot has places for."""
    up_to, at_edges = segments.count_up(winners)
    target = up_to + segments.spread(places.starts - 1 - at_edges[:, :-1])
    taken = winners & (target < segments.spread(places.stops))
    target = torch.where(taken, target, places.total)
    shape = (winners.shape[0], places.total + 1)
    fit = torch.full(shape, NO_ENTRY, dtype=INDEX_DTYPE, device=winners.device)
    index = torch.arange(winners.shape[1], dtype=INDEX_DTYPE, device=winners.device)
    return fit.scatter_(1, target, index.expand_as(target))[:, :-1]


def positions_of(indices: Tensor, regions: HashedRegions, places: Places, empty: int) -> Tensor:
    """Flat positions of [world, places] indices, row o in the region of owner o; `empty` where there is none."""
    inside = torch.maximum(indices, places.lowest)
    positions = regions.positions(places.owners, inside, places.lookup)
    return torch.where(indices >= 0, positions, empty)


def pack_left(places: Tensor, keep: int) -> Tensor:
    """The first `keep` places that are taken, in order, filled up with NO_ENTRY."""
    return places[(places < 0).to(torch.uint8).argsort(stable=True)[:keep]]


def pack(indices: Tensor, values: Tensor) -> Tensor:
    """[..., m] indices and values as bytes, one message per row."""
    return torch.cat(
        [indices.contiguous().view(torch.uint8), values.contiguous().view(torch.uint8)], -1
    )


def unpack(
    messages: Tensor, dtype: torch.dtype, lowest: Tensor | int, highest: Tensor | int
) -> tuple[Tensor, Tensor]:
    """(int32 indices, values) of [..., bytes]; an index that cannot be in its place is refused, or on an accelerator
    marks the step as bad."""
    indices, values = split(messages, dtype)
    # Both bounds are tensors or both are numbers, which no annotation says.
    inside = indices.clamp(lowest, highest)  # type: ignore[arg-type]
    outside = (inside != indices) & (indices != NO_ENTRY)
    if messages.device.type == "cpu":
        if bool(outside.any()):
            raise WireError("a message holds an index outside its owner's region")
        return indices, values
    return torch.where(outside, inside, indices), torch.where(outside, torch.nan, values)


def split(messages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The parts of [..., bytes]: indices as they are, values."""
    width = messages.shape[-1]
    count = width // (INDEX_BYTES + dtype.itemsize)
    if dtype.itemsize == INDEX_BYTES and messages.is_contiguous():
        words = messages.view(INDEX_DTYPE)
        return words[..., :count], words[..., count:].view(dtype)
    rows = messages.reshape(-1, width)
    indices = typed(rows[:, : INDEX_BYTES * count], INDEX_DTYPE)
    values = typed(rows[:, INDEX_BYTES * count :], dtype)
    shape = (*messages.shape[:-1], count)
    return indices.view(shape), values.view(shape)
