"""HostSum: how factors travel if ranks share hosts. Between hosts travels what one worker would send; its ranks share that."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.exchange.requests import (
    BETWEEN,
    INSIDE,
    AllToAll,
    Gather,
    Place,
    Program,
    rescoped,
)
from thinwire.exchange.sums import in_rows
from thinwire.lowrank.summing import FactorSum, Summed


@dataclass(frozen=True, eq=False)
class HostSum:
    """How a buffer of factors is summed in one step over hosts of `per_host` ranks each; host = rank // per_host.

    All ranks multiply with the same basis, so the factor of a host's summed gradient is the sum of its ranks' factors.
    Adding these up is therefore the dense sum inside the host, without the gradient ever travelling:

    1. Inside the host, local rank l receives piece l of everybody's buffer and adds the pieces in rank order.
    2. Local rank l of every host sums its piece with its peers, as ranks without hosts sum the whole.
    3. Inside the host the sums are gathered.

    Step 2 alone is narrow where `narrow` says so. What its roundings lose of a host's piece, the rank that holds it takes
    off its own part.
    """

    place: Place
    per_host: int
    narrow: bool

    @property
    def across(self) -> FactorSum:
        """The sum between hosts."""
        rank, world = self.place.rank // self.per_host, self.place.world // self.per_host
        return FactorSum(Place(rank, world), self.narrow)

    def bytes_per_number(self, dtype: torch.dtype) -> float:
        """What a rank sends for each number of a buffer of that dtype."""
        inside = 2 * (self.per_host - 1) / self.per_host * dtype.itemsize
        return inside + self.across.bytes_per_number(dtype) / self.per_host

    def run(
        self, buffer: Tensor, phase: str, control: int = 0, *, with_part: bool = True
    ) -> Program[Summed]:
        """Sum `buffer`, of which the last `control` elements are flags."""
        numel, itemsize = buffer.numel(), buffer.element_size()
        pieces = in_rows(buffer, self.per_host)
        share = pieces.shape[1]
        request = AllToAll(
            pieces,
            f"{phase}/inside/pieces",
            control_bytes=control * itemsize,
            padding_bytes=(pieces.numel() - numel) * itemsize,
            scope=INSIDE,
        )
        (arrived,) = yield (request,)
        mine = arrived[0].clone()
        for piece in arrived[1:]:
            mine += piece
        first = self.place.rank % self.per_host * share
        # Flags and padding lie behind the factors, in the last pieces.
        beside = share - min(max(numel - control - first, 0), share)
        summed: Summed = yield from rescoped(
            self.across.run(mine, phase, beside, with_part=self.narrow), BETWEEN
        )
        if with_part and self.narrow:
            assert summed.part is not None
            lost = mine - summed.part
            here = buffer[first : first + share]
            here -= lost[: here.numel()]
        (gathered,) = yield (
            Gather(
                summed.total,
                f"{phase}/inside/sums",
                control_bytes=beside * itemsize,
                scope=INSIDE,
                apart=True,
            ),
        )
        return Summed(gathered.reshape(-1)[:numel], buffer if with_part else None)
