"""Summing: how factors travel. One flat buffer per group, reduced over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.exchange.dense import ordered_sum
from thinwire.exchange.requests import AllGather, AllReduce, AllToAll, Place, Program


@dataclass(frozen=True, eq=False)
class Summed:
    """The sum over ranks, and what of it this rank accounts for: over ranks the parts add up to the total."""

    total: Tensor
    part: Tensor | None
    """None where nobody asked for it."""


@dataclass(frozen=True, eq=False)
class FactorSum:
    """How a buffer of factors is summed in one step."""

    place: Place
    deterministic: bool
    narrow: bool
    """bfloat16 on the wire instead of the buffer's own dtype."""

    def bytes_per_number(self, dtype: torch.dtype) -> float:
        """What a rank sends for each number of a buffer of that dtype: the cost of an all-reduce."""
        itemsize = torch.bfloat16.itemsize if self.narrow else dtype.itemsize
        return 2 * (self.place.world - 1) / self.place.world * itemsize

    def run(
        self, buffer: Tensor, phase: str, control: int = 0, *, with_part: bool = True
    ) -> Program[Summed]:
        """Sum `buffer`, of which the last `control` elements are flags; it may be overwritten."""
        if self.narrow:
            summed = yield from self._narrow_sum(buffer, phase, control)
            return summed
        if self.place.world == 1:
            return Summed(buffer, buffer)
        part = buffer.clone() if with_part else None
        if self.deterministic:
            total = yield from ordered_sum(buffer, self.place, phase=phase)
        else:
            (total,) = yield (AllReduce(buffer, phase, control * buffer.element_size()),)
        return Summed(total, part)

    def _narrow_sum(self, buffer: Tensor, phase: str, control: int) -> Program[Summed]:
        """Sum of bfloat16 numbers in the buffer's own precision, at the bytes of a bfloat16 all-reduce.

        An all-reduce in bfloat16 would round at every addition, and nobody could keep what that loses.

        1. Each rank rounds its buffer and sends piece p to rank p; what the rounding lost was never sent.
        2. Rank p adds the pieces in rank order and rounds their sum; what that loses it takes off its own part.
        3. The rounded sums are gathered.
        """
        world, numel = self.place.world, buffer.numel()
        share = -(-numel // world)
        sent = torch.zeros(world, share, dtype=torch.bfloat16, device=buffer.device)
        sent.view(-1)[:numel] = buffer
        part = sent.to(buffer.dtype)
        if world == 1:
            return Summed(part.view(-1)[:numel], part.view(-1)[:numel])
        (pieces,) = yield (AllToAll(sent, phase, control * sent.element_size()),)
        total = pieces[0].to(buffer.dtype)
        for piece in pieces[1:]:
            total += piece
        rounded = total.to(torch.bfloat16)
        part[self.place.rank] -= total - rounded.to(buffer.dtype)
        flags = control * rounded.element_size() // world
        (gathered,) = yield (AllGather(rounded, phase, flags),)
        return Summed(gathered.reshape(-1)[:numel].to(buffer.dtype), part.view(-1)[:numel])
