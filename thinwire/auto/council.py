"""Council: how ranks come to the same figures and the same decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from thinwire.engine.agreement import broadcast_bytes, device_of
from thinwire.errors import ExchangeError
from thinwire.exchange.requests import Place

MADE = b"+"
"""Before what was made. The name of an error begins with a letter."""


class Council:
    """All ranks of a group. Every rank calls the same method at the same step; each is a collective that the host waits for."""

    def __init__(self, group: dist.ProcessGroup, place: Place) -> None:
        self.group = group
        self.place = place

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of each value the largest that any rank brings: the slowest worker and the slowest link decide."""
        tensor = torch.tensor(list(values), dtype=torch.float64, device=device_of(self.group))
        if tensor.numel():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()

    def decide(self, make: Callable[[], str]) -> str:
        """What rank 0 makes, on every rank; if it cannot, all of them fail."""
        mine, error = b"", None
        if self.place.rank == 0:
            try:
                mine = MADE + make().encode()
            except Exception as raised:
                # The others wait for an answer, so that they get one before this rank fails.
                mine, error = f"{type(raised).__name__}: {raised}".encode(), raised
        told = broadcast_bytes(self.group, mine, 0)
        if error is not None:
            raise error
        if not told.startswith(MADE):
            raise ExchangeError(f"rank 0 could not decide for all: {told.decode()}")
        return told.removeprefix(MADE).decode()
