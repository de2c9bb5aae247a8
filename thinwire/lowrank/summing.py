"""Summing: how factors travel. One flat buffer per group, reduced over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.exchange.requests import Place, Program, Sum
from thinwire.exchange.sums import in_rows, sum_by_owners


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
        flags = control * buffer.element_size()
        (total,) = yield (Sum(buffer, phase, control_bytes=flags),)
        return Summed(total, part)

    def _narrow_sum(self, buffer: Tensor, phase: str, control: int) -> Program[Summed]:
        """Sum of bfloat16 numbers in the buffer's own precision.

        What rounding its buffer loses a rank never sent. What rounding a sum loses its owner takes off its own part.
        """
        world, numel = self.place.world, buffer.numel()
        sent = in_rows(buffer, world, torch.bfloat16)
        part = sent.to(buffer.dtype)
        if world == 1:
            return Summed(part.view(-1)[:numel], part.view(-1)[:numel])
        gathered, lost = yield from sum_by_owners(
            sent,
            phase,
            sum_dtype=buffer.dtype,
            rounding=torch.Tensor.bfloat16,
            control_bytes=control * sent.element_size(),
        )
        part[self.place.rank] -= lost
        return Summed(gathered.reshape(-1)[:numel].to(buffer.dtype), part.view(-1)[:numel])
