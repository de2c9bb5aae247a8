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
    """All ranks of a group. Every rank calls the same method at the same step; each is a collective that the host waits for.

    `beside` are groups over which, one after the other, the ranks that share one copy of a sharded model are reached: they sit in
    the council as well, so that all shards are sent in the same way.
    """

    def __init__(
        self, group: dist.ProcessGroup, place: Place, beside: Sequence[dist.ProcessGroup] = ()
    ) -> None:
        self.place = place
        self.groups = [*beside, group]
        self.leads = all(dist.get_rank(one) == 0 for one in self.groups)
        """Whether this rank decides for all, and speaks for them."""
        self.shards = [dist.get_world_size(one) for one in beside]
        """Ranks of each of the groups beside."""

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of each value the largest that any rank brings: the slowest worker and the slowest link decide."""
        tensor = torch.tensor(list(values), dtype=torch.float64)
        for group in self.groups if tensor.numel() else ():
            tensor = tensor.to(device_of(group))
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        return tensor.tolist()

    def wait(self) -> None:
        """Until all ranks are here."""
        self.largest([0.0])

    def decide(self, make: Callable[[], str]) -> str:
        """What rank 0 makes, on every rank; if it cannot, all of them fail."""
        mine, error = b"", None
        if self.leads:
            try:
                mine = MADE + make().encode()
            except Exception as raised:
                # The others wait for an answer, so that they get one before this rank fails.
                mine, error = f"{type(raised).__name__}: {raised}".encode(), raised
        told = mine
        for group in self.groups:
            told = broadcast_bytes(group, told, 0)
        if error is not None:
            raise error
        if not told.startswith(MADE):
            raise ExchangeError(f"rank 0 could not decide for all: {told.decode()}")
        return told.removeprefix(MADE).decode()
