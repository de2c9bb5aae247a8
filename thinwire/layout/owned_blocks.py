"""OwnedBlocks: the slots of a group cut into blocks, and which rank adds up which of them.

A block never crosses a slot. A slot's blocks are cut into as many runs as there are ranks, which differ by one block at most;
the hash of its name says who gets the first run, so that small slots take turns. All of it follows from the slot and the number
of ranks: what an owner holds back of its blocks is found again in another bucketing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.layout.groups import Cuts, Group
from thinwire.layout.slots import Slot


class Run(NamedTuple):
    """Neighbouring blocks of a slot that one rank owns."""

    slot: int
    owner: int
    first: int
    """Block."""
    blocks: int
    elements: int


class OwnedBlocks:
    """A group's elements as [owners, width, size]: for each owner its blocks, slot by slot, filled up with zeros.

    Moving all of them is a fixed number of operations, whatever the number of slots.
    """

    def __init__(self, group: Group, size: int, owners: int) -> None:
        self.size = size
        self.owners = owners
        self.device = group.device
        self.runs = runs = [
            run
            for index, slot in enumerate(group.slots)
            for run in cut_into_runs(index, slot, size, owners)
        ]
        owned = [sum(run.blocks for run in runs if run.owner == rank) for rank in range(owners)]
        self.width = max(owned, default=0)
        """Blocks of the rank that owns most."""
        self.blocks = sum(owned)
        """Of all ranks, without what fills up."""
        self._sources = Cuts([(_begin(group.slots, run, size), run.elements) for run in runs])
        self._runs_of = [
            [index for index, run in enumerate(runs) if run.owner == rank] for rank in range(owners)
        ]
        self.firsts = firsts = self._first_blocks(runs)
        """Where each run begins among all owners' blocks."""
        self._targets = [
            Cuts([(firsts[index] % self.width * size, runs[index].elements) for index in chosen])
            for chosen in self._runs_of
        ]
        self._slots = group.slots

    @cached_property
    def _described(self) -> Tensor:
        """int32 [3, owners, width]; made when it is asked for, because kernels have tables of their own."""
        described = torch.zeros(3, self.owners * self.width, dtype=torch.int32)
        for first, run in zip(self.firsts, self.runs, strict=True):
            described[:, first : first + run.blocks] = self._describe(run)
        return described.view(3, self.owners, self.width).to(self.device)

    @property
    def lengths(self) -> Tensor:
        """int32 [owners, width]: elements of each block; 0 for one that fills up."""
        return self._described[0]

    @property
    def slots(self) -> Tensor:
        """int32 [owners, width]: which slot each block belongs to."""
        return self._described[1]

    @property
    def places(self) -> Tensor:
        """int32 [owners, width]: how many elements of its slot come before each block."""
        return self._described[2]

    def _first_blocks(self, runs: Sequence[Run]) -> list[int]:
        """Where each run begins among all owners' blocks."""
        taken = [rank * self.width for rank in range(self.owners)]
        firsts = []
        for run in runs:
            firsts.append(taken[run.owner])
            taken[run.owner] += run.blocks
        return firsts

    def _describe(self, run: Run) -> Tensor:
        """int32 [3, blocks]: lengths, slot, places."""
        places = (run.first + torch.arange(run.blocks)) * self.size
        lengths = (self._slots[run.slot].numel - places).clamp(max=self.size)
        # Places wrap around in a slot that 32 bits cannot count; only draws are made of them.
        return torch.stack([lengths, torch.full_like(places, run.slot), places]).to(torch.int32)

    def cut(self, flat: Tensor, owners: Sequence[int] | None = None) -> Tensor:
        """[owners, width, size] of a group's flat buffer; of some owners, or of all."""
        chosen = range(self.owners) if owners is None else owners
        blocks = flat.new_zeros(len(chosen), self.width, self.size)
        pieces, rows = self._pairs(flat, blocks, chosen)
        if pieces:
            torch._foreach_copy_(rows, pieces)
        return blocks

    def write(self, blocks: Tensor, flat: Tensor, owners: Sequence[int] | None = None) -> None:
        """Write [owners, width, size] of some owners, or of all, to a group's flat buffer."""
        chosen = range(self.owners) if owners is None else owners
        pieces, rows = self._pairs(flat, blocks, chosen)
        if pieces:
            torch._foreach_copy_(pieces, rows)

    def _pairs(
        self, flat: Tensor, blocks: Tensor, owners: Sequence[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(pieces of the flat buffer, the same in blocks)."""
        parts = self._sources.of(flat)
        pieces = [parts[index] for owner in owners for index in self._runs_of[owner]]
        rows = [
            piece
            for owner, row in zip(owners, blocks, strict=True)
            for piece in self._targets[owner].of(row.reshape(-1))
        ]
        return pieces, rows


def cut_into_runs(index: int, slot: Slot, size: int, owners: int) -> list[Run]:
    """The runs of one slot in memory order; those without a block are left out."""
    blocks = -(-slot.numel // size)
    turn = zlib.crc32(slot.name.encode()) % owners
    runs = []
    for part in range(owners):
        first, last = part * blocks // owners, (part + 1) * blocks // owners
        elements = min(last * size, slot.numel) - first * size
        if last > first:
            runs.append(Run(index, (part + turn) % owners, first, last - first, elements))
    return runs


def _begin(slots: Sequence[Slot], run: Run, size: int) -> int:
    return slots[run.slot].offset + run.first * size
