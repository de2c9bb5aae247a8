"""Messages of fixed size for split-and-reduce: so many places per slot and owner, whatever the data.

An entry is an int32 index inside the owner's region and a value in the wire's dtype. Places that no entry took hold
NO_ENTRY. Nothing here makes the host of an accelerator wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import WireError
from thinwire.exchange.common import INDEX_DTYPE, NO_ENTRY, typed
from thinwire.exchange.regions import Regions

INDEX_BYTES = INDEX_DTYPE.itemsize
MAGNITUDE_BITS = 31
LAST = (1 << MAGNITUDE_BITS) - 1
"""The sorting key of what is not there."""


def magnitude_bits(values: Tensor) -> Tensor:
    """int32 with the order of |values|."""
    return values.abs().float().view(torch.int32)


def falling(values: Tensor, present: Tensor) -> Tensor:
    """int32 that sorts values by falling magnitude; those that are not `present` come last. 0 counts as the smallest number."""
    return torch.where(present, LAST - magnitude_bits(values).clamp_(min=1), LAST)


class Places:
    """How many places each slot has in a message to or from one owner, and where they begin.

    The entries of one slot for one owner are a box.
    """

    def __init__(self, regions: Regions, counts: Sequence[int], world: int) -> None:
        device = regions.device
        sizes = torch.tensor(counts)
        starts = sizes.cumsum(0) - sizes
        self.world = world
        self.total = sum(counts)
        self.sizes = list(counts)
        """By slot: how many places it has."""
        self.regions = regions
        self.slots = torch.arange(len(counts)).repeat_interleave(sizes).to(device)
        """By place: its slot."""
        self.turns = torch.arange(self.total, device=device) - starts.to(device)[self.slots]
        """By place: how many places of its slot are before it."""
        self.lookup = regions.lookup(self.slots)
        self.lowest = regions.edges[self.slots].to(INDEX_DTYPE)
        """By place: the smallest index that may be in it, and the largest."""
        self.highest = (regions.edges[self.slots + 1] - 1).to(INDEX_DTYPE)
        self.behind = 2 * regions.edges[self.slots + 1] - 1
        """By place: what sorts an empty one behind its slot's last index and before the next slot's first, if indices are doubled."""
        self.owners = torch.arange(world, device=device)[:, None]
        firsts = (torch.arange(world)[:, None] * self.total + starts).view(-1)
        nowhere = torch.zeros(1, dtype=torch.int64)
        self.box_starts = torch.cat([firsts, nowhere]).to(device)
        """By box, and one more for what has no place: where it begins in all messages of a rank."""
        self.box_rooms = torch.cat([sizes.repeat(world), nowhere]).to(device)
        self.box_bounds = torch.arange(len(firsts) + 2, device=device)


@dataclass(frozen=True, eq=False)
class Proposal:
    """This rank's selected entries, and those of them that found a place in a message."""

    placed: Tensor
    """bool [entries]"""
    indices: Tensor
    """int32 [world, places]"""
    values: Tensor
    """wire dtype [world, places]"""


def propose(wire: Tensor, box: Tensor, index: Tensor, places: Places) -> Proposal:
    """Sort selected entries into messages: the largest of every box, ties to the first entry, in the order of the entries."""
    nowhere, rooms = places.box_starts.numel() - 1, places.box_rooms
    box = torch.where(wire != 0, box, nowhere)
    turn = turns_in_boxes(box, places) if wire.device.type == "cpu" else None
    # The usual case is that all fit. An accelerator would have to wait to know.
    if turn is None or bool(((turn >= rooms[box]) & (box < nowhere)).any()):
        by_size = turns_in_boxes(box, places, LAST - magnitude_bits(wire))
        box = torch.where(by_size < rooms[box], box, nowhere)
        turn = turns_in_boxes(box, places)
    dump = places.world * places.total
    target = torch.where(box < nowhere, places.box_starts[box] + turn, dump)
    indices = torch.full((dump + 1,), NO_ENTRY, dtype=INDEX_DTYPE, device=wire.device)
    indices.scatter_(0, target, index.to(INDEX_DTYPE))
    values = torch.zeros(dump + 1, dtype=wire.dtype, device=wire.device).scatter_(0, target, wire)
    shape = (places.world, -1)
    return Proposal(target < dump, indices[:-1].view(shape), values[:-1].view(shape))


def turns_in_boxes(box: Tensor, places: Places, keys: Tensor | None = None) -> Tensor:
    """By entry: how many of its box come before it, in the order of int32 `keys` if there are any, then of the entries."""
    if keys is None:
        sorted_boxes, order = box.sort(stable=True)
    else:
        both, order = ((box << 32) + keys).sort(stable=True)
        sorted_boxes = both >> 32
    before = torch.searchsorted(sorted_boxes, places.box_bounds)
    turn = torch.arange(box.numel(), device=box.device) - before[sorted_boxes]
    return torch.empty_like(turn).scatter_(0, order, turn)


def add_arrived(indices: Tensor, values: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """[1 + region]: the sum of entries [world, places], rank 0's first. The first element, which is zero, is the dump of
    empty places."""
    target = indices.long() + 1
    sums = torch.zeros(size + 1, dtype=dtype, device=values.device)
    add_by_rank(sums, target, values.to(dtype))
    sums[:1].zero_()
    return sums


def add_by_rank(sums: Tensor, target: Tensor, values: Tensor) -> None:
    """sums[target] += values for [world, m] entries, those of rank 0 first."""
    if sums.device.type == "cpu":
        # index_add_ on the CPU goes from front to back, which is rank order.
        sums.index_add_(0, target.view(-1), values.reshape(-1))
        return
    for row, numbers in zip(target, values, strict=True):
        sums.index_add_(0, row, numbers)


def largest_by_slot(
    values: Tensor, present: Tensor, slot: Tensor, slots: Tensor, turns: Tensor
) -> tuple[Tensor, Tensor]:
    """(a place in `values`, whether there is one): of every slot the largest that are `present`, ties to the first.

    `slot` says whose each value is. The answers' `slots` are given, and their `turns`: 0 for the largest of a slot, 1 for the next.
    """
    keys, order = ((slot << 32) + falling(values, present)).sort(stable=True)
    at = torch.searchsorted(keys, slots << 32) + turns
    at = at.clamp_(max=order.numel() - 1)
    chosen = order[at]
    return chosen, (keys[at] >> 32 == slots) & present[chosen]


def largest_sums(sums: Tensor, indices: Tensor, places: Places, back: Places) -> Tensor:
    """int32 [places of `back`]: the largest sums of every slot where something arrived, ties to the lowest index; by rising
    index, empty places last.

    `sums` has the dump of empty places first, `indices` [world, places] are all that arrived. A sum may be exactly zero and still
    be one.
    """
    keys = torch.where(indices >= 0, 2 * indices.long(), places.behind).view(-1).sort().values
    new = keys % 2 == 0
    new[1:] &= keys[1:] != keys[:-1]
    found = keys >> 1
    slot = torch.bucketize(found, back.regions.edges[1:], right=True)
    chosen, inside = largest_by_slot(sums[found + 1], new, slot, back.slots, back.turns)
    keys = torch.where(inside, 2 * found[chosen], back.behind).sort().values
    return torch.where(keys % 2 == 0, keys >> 1, NO_ENTRY).to(INDEX_DTYPE)


@dataclass(frozen=True, eq=False)
class Winners:
    """What is kept, the same on all ranks: [entries], and as many places of the messages."""

    positions: Tensor
    """Flat; one behind the group where nothing is kept."""
    values: Tensor
    """As the wire has them."""
    places: Tensor
    """Of all messages, row by row; one behind them where nothing is kept."""


def choose_winners(
    indices: Tensor, values: Tensor, places: Places, slots: Tensor, turns: Tensor, numel: int
) -> Winners:
    """The largest of each slot's gathered sums [world, places], ties to the lowest owner, then to its first.

    `slots` and `turns` say how many: see `largest_by_slot`. A turn below 0 keeps nothing.
    """
    flat, numbers = indices.reshape(-1), values.reshape(-1)
    slot = places.slots.expand(places.world, -1).reshape(-1)
    best, taken = largest_by_slot(numbers, flat >= 0, slot, slots, turns.clamp(min=0))
    taken &= turns >= 0
    positions = positions_of(indices, places, numel).view(-1)
    return Winners(
        torch.where(taken, positions[best], numel),
        torch.where(taken, numbers[best], 0),
        torch.where(taken, best, flat.numel()),
    )


def positions_of(indices: Tensor, places: Places, empty: int) -> Tensor:
    """Flat positions of [world, places] indices, row o in the region of owner o; `empty` where there is none."""
    inside = torch.maximum(indices, places.lowest)
    positions = places.regions.positions(places.owners, inside, places.lookup)
    return torch.where(indices >= 0, positions, empty)


def pack_left(places: Tensor, keep: int) -> Tensor:
    """The first `keep` places that are taken, in order, filled up with NO_ENTRY."""
    return places[(places < 0).to(torch.uint8).argsort(stable=True)[:keep]]


def pack(indices: Tensor, values: Tensor) -> Tensor:
    """[..., m] indices and values as bytes, one message per row, filled up to whole words."""
    parts = [indices.contiguous().view(torch.uint8), values.contiguous().view(torch.uint8)]
    missing = -parts[1].shape[-1] % 4
    if missing:
        parts.append(parts[1].new_zeros((*parts[1].shape[:-1], missing)))
    return torch.cat(parts, -1)


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
    middle, end = INDEX_BYTES * count, (INDEX_BYTES + dtype.itemsize) * count
    indices, values = typed(rows[:, :middle], INDEX_DTYPE), typed(rows[:, middle:end], dtype)
    shape = (*messages.shape[:-1], count)
    return indices.view(shape), values.view(shape)
