"""Regions: who owns which part of the gradient while it is being summed.

`HashedRegions` deals out blocks of 64 elements in a pseudo-random order that the slot's name fixes: balanced without
any agreement between ranks, and the same in every bucketing. `WholeRegion` has one owner.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from thinwire.layout import RowTable

BLOCK_BITS = 6
# With fewer blocks per owner than this, chance alone would unbalance the owners, and blocks are made smaller.
BLOCKS_PER_OWNER = 256


class Regions(ABC):
    """Where the elements of a group lie while they are summed: an owner, and an index in the owner's region."""

    device: torch.device
    size: int
    """Elements of a region, the same for every owner; some may be beyond the end of their slot."""
    edges: Tensor
    """[slots + 1]: where each slot's part of a region begins and ends."""

    @abstractmethod
    def locate(self, positions: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """(owner x number of slots + slot, index in the owner's region) of flat positions in the given slots."""

    @abstractmethod
    def lookup(self, slots: Tensor) -> Tensor:
        """What `positions` has to know of the slots of some indices; worth keeping where these are always the same."""

    @abstractmethod
    def positions(self, owner: Tensor, index: Tensor, lookup: Tensor) -> Tensor:
        """Flat positions of indices in an owner's region; the inverse of `locate`."""


class WholeRegion(Regions):
    """One owner has everything: an index is a flat position."""

    def __init__(self, table: RowTable, device: torch.device) -> None:
        self.device, self.size = device, table.numel
        starts = [rows.slot.offset for rows in table.rows]
        self.edges = torch.tensor([*starts, table.numel], device=device)

    def locate(self, positions: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        return slots, positions

    def lookup(self, slots: Tensor) -> Tensor:
        return slots

    def positions(self, owner: Tensor, index: Tensor, lookup: Tensor) -> Tensor:
        return index.long()


class HashedRegions(Regions):
    """Every slot's blocks spread over the owners; an owner's blocks lie side by side, slot after slot, in the order of the slot.

    So indices in a region rise with positions, and what is selected in rising order arrives in rising order.

    A position's owner and its place in the owner's region come from one table of n/64 numbers. The order of the
    blocks is a random permutation and not `block mod world`: with rows of 768 = 12 x 64 elements the columns of a
    matrix would all fall to the same owners.
    """

    def __init__(self, table: RowTable, world: int, device: torch.device) -> None:
        self.device = device
        shifts = [block_bits(rows.slot.numel, world) for rows in table.rows]
        owners, turns, bases, begins, edges = [], [], [0], [0], [0]
        for rows, shift in zip(table.rows, shifts, strict=True):
            blocks = -(-rows.slot.numel >> shift)
            deal = deal_blocks(rows.slot.name, blocks)
            owners.append((deal + zlib.crc32(rows.slot.name.encode())) % world)
            turns.append(count_before(owners[-1], world))
            bases.append(bases[-1] + blocks)
            begins.append(begins[-1] + -(-blocks // world))
            edges.append(edges[-1] + (-(-blocks // world) << shift))
        self.size = edges[-1]
        self.edges = torch.tensor(edges, device=device)
        self.blocks = begins[-1]
        """Blocks of a region."""
        offsets = [rows.slot.offset for rows in table.rows]
        masks = [(1 << shift) - 1 for shift in shifts]
        numbers = torch.tensor([offsets, bases[:-1], begins[:-1], edges[:-1], shifts, masks])
        self.by_slot = numbers.to(device)
        """[6, slots]: where the slot begins in the group, among all blocks, among a region's blocks and in a region;
        log2 of its block size, and that as a mask."""
        counts = torch.tensor(bases).diff()
        slots = torch.arange(len(table.rows)).repeat_interleave(counts)
        begin, base, first, edge, shift, _ = numbers[:, slots]
        owner, turn = torch.cat(owners), torch.cat(turns)
        self.boxes = (owner * len(table.rows) + slots).to(device)
        self.firsts = (edge + (turn << shift)).to(device)
        """Where each block begins in its owner's region."""
        starts = torch.zeros(world, self.blocks, dtype=torch.int64)
        starts[owner, first + turn] = begin + (torch.arange(bases[-1]) - base << shift)
        self.starts = starts.view(-1).to(device)
        """By owner and block of its region: the flat position where it begins."""

    def locate(self, positions: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        begin, base, _, _, shift, mask = self.by_slot.index_select(1, slots)
        inside = positions - begin
        block = (inside >> shift) + base
        return self.boxes[block], self.firsts[block] + (inside & mask)

    def lookup(self, slots: Tensor) -> Tensor:
        return self.by_slot[2:].index_select(1, slots)

    def positions(self, owner: Tensor, index: Tensor, lookup: Tensor) -> Tensor:
        first, edge, shift, mask = lookup
        local = index - edge
        return self.starts[(local >> shift) + (owner * self.blocks + first)] + (local & mask)


def block_bits(numel: int, world: int) -> int:
    """log2 of the block size for a slot: 64 elements unless the slot is too small for that."""
    bits = BLOCK_BITS
    while bits and numel < (BLOCKS_PER_OWNER * world) << bits:
        bits -= 1
    return bits


def deal_blocks(name: str, blocks: int) -> Tensor:
    """The turn at which each block of a slot is dealt out."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randperm(blocks, generator=generator)


def count_before(owners: Tensor, world: int) -> Tensor:
    """By block: how many of the same owner come before it."""
    of_owner, order = owners.sort(stable=True)
    counts = owners.bincount(minlength=world)
    before = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[of_owner]
    return torch.empty_like(before).scatter_(0, order, before)
