"""Regions: who owns which part of the gradient while it is being summed.

`HashedRegions` deals out blocks of 64 elements in a pseudo-random order that the slot's name fixes: balanced without
any agreement between ranks, and the same in every bucketing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.exchange.segments import Edges
from thinwire.select.rows import RowTable

BLOCK_BITS = 6
# With fewer blocks per owner than this, chance alone would unbalance the owners, and blocks are made smaller.
BLOCKS_PER_OWNER = 256


class HashedRegions:
    """Every slot's blocks spread over the owners; an owner's blocks lie side by side, slot after slot.

    A position's owner and its place in the owner's region come from one table of n/64 numbers. The order of the
    blocks is a random permutation and not `block mod world`: with rows of 768 = 12 x 64 elements the columns of a
    matrix would all fall to the same owners.
    """

    def __init__(self, table: RowTable, world: int, device: torch.device) -> None:
        self.world = world
        self.device = device
        shifts = [block_bits(rows.slot.numel, world) for rows in table.rows]
        owners, turns, bases, begins, edges = [], [], [0], [0], [0]
        for rows, shift in zip(table.rows, shifts, strict=True):
            blocks = -(-rows.slot.numel >> shift)
            turn = deal_blocks(rows.slot.name, blocks)
            owners.append((turn + zlib.crc32(rows.slot.name.encode())) % world)
            turns.append(turn // world)
            bases.append(bases[-1] + blocks)
            begins.append(begins[-1] + -(-blocks // world))
            edges.append(edges[-1] + (-(-blocks // world) << shift))
        self.size = edges[-1]
        """Elements of a region, the same for every owner; some are beyond the end of their slot."""
        self.edges = Edges(edges, device)
        """Where each slot's part of a region begins and ends."""
        self._offsets = torch.tensor([rows.slot.offset for rows in table.rows], device=device)
        self._shifts = torch.tensor(shifts, device=device)
        self._bases = torch.tensor(bases[:-1], device=device)
        self._begins = torch.tensor(begins[:-1], device=device)
        self._edges = self.edges.on_device[:-1]
        self._owners = torch.cat(owners).to(device)
        self._turns = torch.cat(turns).to(device)
        self._starts = self._find_starts(table, shifts, begins)

    def _find_starts(self, table: RowTable, shifts: Sequence[int], begins: Sequence[int]) -> Tensor:
        """[world, blocks of a region]: the flat position where each block begins."""
        starts = torch.zeros(self.world, begins[-1], dtype=torch.int64, device=self.device)
        firsts, rows_of_block = [], []
        for which, (rows, shift) in enumerate(zip(table.rows, shifts, strict=True)):
            blocks = -(-rows.slot.numel >> shift)
            firsts.append(rows.slot.offset + (torch.arange(blocks) << shift))
            rows_of_block.append(torch.full((blocks,), begins[which]))
        place = torch.cat(rows_of_block).to(self.device) + self._turns
        starts[self._owners, place] = torch.cat(firsts).to(self.device)
        return starts

    def place(self, positions: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """(owner, index in the owner's region) of flat positions."""
        inside = positions - self._offsets[slots]
        shift = self._shifts[slots]
        block = self._bases[slots] + (inside >> shift)
        within = inside & ((1 << shift) - 1)
        return self._owners[block], self._edges[slots] + (self._turns[block] << shift) + within

    def positions(self, owner: Tensor | int, index: Tensor) -> Tensor:
        """Flat positions of indices in an owner's region; the inverse of `place`."""
        slots = torch.bucketize(index, self._edges, right=True) - 1
        local = index - self._edges[slots]
        shift = self._shifts[slots]
        within = local & ((1 << shift) - 1)
        return self._starts[owner, self._begins[slots] + (local >> shift)] + within


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
