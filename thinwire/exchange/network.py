"""Network: performs requests on a torch process group."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import ExchangeError
from thinwire.exchange.requests import AllGather, AllReduce, AllToAll, Batch, Place, Request
from thinwire.observe.ledger import Ledger

# torch 2.13 renames it and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Network:
    """One process group, seen as a performer of batches of requests."""

    def __init__(self, group: dist.ProcessGroup, ledger: Ledger) -> None:
        self.group = group
        self.place = Place(dist.get_rank(group), dist.get_world_size(group))
        self.ledger = ledger

    def perform(self, batch: Batch) -> list[Tensor]:
        """Issue all requests, then wait for all: on gloo until done, on NCCL only the current stream waits."""
        began = time.perf_counter()
        issued = [self._issue(request) for request in batch]
        replies = []
        for request, (work, reply) in zip(batch, issued, strict=True):
            work.wait()
            self.ledger.record(request, time.perf_counter() - began)
            replies.append(reply)
        return replies

    def _issue(self, request: Request) -> tuple[dist.Work, Tensor]:
        tensor = request.tensor.contiguous()
        world = self.place.world
        match request:
            case AllReduce():
                work = dist.all_reduce(tensor, group=self.group, async_op=True)
                reply = tensor
            case AllGather():
                flat = torch.empty(world * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
                work = _all_gather(flat, tensor, group=self.group, async_op=True)
                reply = flat.view(world, tensor.numel())
            case AllToAll():
                reply = torch.empty_like(tensor)
                work = dist.all_to_all_single(reply, tensor, group=self.group, async_op=True)
            case _:
                raise ExchangeError(f"unknown request {request.kind!r}")
        assert work is not None
        return work, reply


def private_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A second gloo group over the same ranks: requests of two threads on one group could interleave differently
    on different ranks.

    Only the members of a subgroup call this, so a subgroup's twin is created by local synchronisation. Torch then
    derives its name from the ranks alone, and a second one after the first was destroyed would read the first one's
    stale addresses; that is why `release_group` leaves such a twin alone.
    """
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(
        ranks,
        backend="gloo",
        timeout=group_timeout(group),
        use_local_synchronization=not _is_everyone(ranks),
        group_desc="thinwire",
    )


def release_group(group: dist.ProcessGroup) -> None:
    """Free a private group's threads and sockets where that is safe."""
    if _is_everyone(dist.get_process_group_ranks(group)):
        dist.destroy_process_group(group)


def _is_everyone(ranks: list[int]) -> bool:
    return len(ranks) == dist.get_world_size()


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The user's own timeout, so that a dead peer is noticed when they expect it."""
    try:
        return group._get_backend(torch.device("cpu")).options._timeout
    except (RuntimeError, AttributeError):
        return None


def agree(group: dist.ProcessGroup, settings: dict[str, str]) -> None:
    """Raise the same sentence on every rank if `settings` differ between ranks."""
    gathered: list[dict[str, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, settings, group=group)
    first = gathered[0]
    assert first is not None
    for rank, other in enumerate(gathered):
        assert other is not None
        for key in sorted({*first, *other}):
            if first.get(key) != other.get(key):
                raise ExchangeError(
                    f"{key} differs between ranks: rank 0 has {first.get(key, 'nothing')}, "
                    f"rank {rank} has {other.get(key, 'nothing')}; all ranks must use the same settings"
                )
