"""Network: performs requests on a torch process group."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import ExchangeError
from thinwire.exchange.requests import (
    BETWEEN,
    EVERYONE,
    INSIDE,
    AllGather,
    AllReduce,
    AllToAll,
    AllToAllUneven,
    Batch,
    Broadcast,
    Place,
    Request,
    Swap,
)
from thinwire.observe.ledger import Ledger

# torch 2.13 renames it and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Network:
    """One process group, seen as a performer of batches of requests.

    `scopes` are further groups over parts of the same ranks, by the scope that requests name.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ledger: Ledger,
        scopes: Mapping[str, dist.ProcessGroup] | None = None,
    ) -> None:
        self.group = group
        self.place = place_in(group)
        self.ledger = ledger
        self.groups = {EVERYONE: group, **(scopes or {})}
        self.per_host: int | None = None
        self.places = {scope: place_in(member) for scope, member in self.groups.items()}

    def add_hosts(self, per_host: int) -> None:
        """Make the groups for requests inside and between hosts; every rank calls it at the same point."""
        if per_host == self.per_host:
            return
        made = host_groups(self.group, per_host)
        self.per_host = per_host
        self.groups.update(made)
        self.places.update({scope: place_in(member) for scope, member in made.items()})

    def perform(self, batch: Batch) -> list[Tensor]:
        """Issue all requests, then wait for all: on gloo until done, on NCCL only the current stream waits."""
        began = time.perf_counter()
        issued = [self._issue(request) for request in batch]
        replies = []
        for request, (work, reply) in zip(batch, issued, strict=True):
            work.wait()
            self.ledger.record(request, time.perf_counter() - began, self._place(request).world)
            replies.append(reply)
        return replies

    def _place(self, request: Request) -> Place:
        try:
            return self.places[request.scope]
        except KeyError:
            raise ExchangeError(
                f"a request for the ranks {request.scope!r} came to a network that knows {sorted(self.places)}"
            ) from None

    def _issue(self, request: Request) -> tuple[dist.Work, Tensor]:
        tensor = request.tensor.contiguous()
        world = self._place(request).world
        group = self.groups[request.scope]
        work: dist.Work | None
        match request:
            case AllReduce():
                work = dist.all_reduce(tensor, group=group, async_op=True)
                reply = tensor
            case AllGather():
                flat = torch.empty(world * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
                work = _all_gather(flat, tensor, group=group, async_op=True)
                reply = flat.view(world, tensor.numel())
            case AllToAll():
                reply = torch.empty_like(tensor)
                work = dist.all_to_all_single(reply, tensor, group=group, async_op=True)
            case AllToAllUneven(send=send, receive=receive):
                reply = tensor.new_empty((sum(receive), *tensor.shape[1:]))
                work = dist.all_to_all_single(
                    reply, tensor, list(receive), list(send), group=group, async_op=True
                )
            case Broadcast(source=source):
                reply = tensor
                work = dist.broadcast(tensor, group=group, group_src=source, async_op=True)
            case Swap():
                return _swap(request, tensor, group)
            case _:
                raise ExchangeError(f"unknown request {request.kind!r}")
        assert work is not None
        return work, reply


class _Several:
    """Several pieces of work that are waited for together."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _swap(request: Swap, tensor: Tensor, group: dist.ProcessGroup) -> tuple[Any, Tensor]:
    operations = []
    reply = tensor.new_empty(tensor.shape if request.source is not None else 0)
    if request.to is not None:
        operations.append(dist.P2POp(dist.isend, tensor, group=group, group_peer=request.to))
    if request.source is not None:
        operations.append(dist.P2POp(dist.irecv, reply, group=group, group_peer=request.source))
    return _Several(dist.batch_isend_irecv(operations) if operations else []), reply


def place_in(group: dist.ProcessGroup) -> Place:
    return Place(dist.get_rank(group), dist.get_world_size(group))


def private_group(
    group: dist.ProcessGroup, device: torch.device | None = None
) -> dist.ProcessGroup:
    """A second group over the same ranks, gloo or what `group` has for `device`: requests of two threads on one group could
    interleave differently on different ranks.

    Only the members of a subgroup call this, so a subgroup's twin is created by local synchronisation. Torch then
    derives its name from the ranks alone, and a second one after the first was destroyed would read the first one's
    stale addresses; that is why `release_group` leaves such a twin alone.
    """
    ranks = dist.get_process_group_ranks(group)
    backend = "gloo" if device is None else group._get_backend(device).name()
    options, timeout = None, group_timeout(group, device)
    if backend == "nccl":
        # Its kernels are small and the network waits for them; behind backward's they would queue for milliseconds.
        # Not in builds without CUDA.
        options = vars(dist)["ProcessGroupNCCL"].Options(is_high_priority_stream=True)
        if timeout is not None:
            # Torch warns of options that say something else than `timeout` does.
            options._timeout = timeout
    return dist.new_group(
        ranks,
        backend=backend,
        timeout=timeout,
        pg_options=options,
        use_local_synchronization=not _is_everyone(ranks),
        group_desc="thinwire",
    )


def host_groups(group: dist.ProcessGroup, per_host: int) -> dict[str, dist.ProcessGroup]:
    """This rank's group inside its host and its group of equal local ranks between hosts. Collective over `group`."""
    ranks = dist.get_process_group_ranks(group)
    hosts = [ranks[start : start + per_host] for start in range(0, len(ranks), per_host)]
    if len(hosts[-1]) != per_host:
        raise ExchangeError(
            f"per_host is {per_host}; it must divide the number of ranks, {len(ranks)}"
        )
    teams = {INSIDE: hosts, BETWEEN: [list(team) for team in zip(*hosts, strict=True)]}
    mine: dict[str, dist.ProcessGroup] = {}
    for scope, members in teams.items():
        for team in members:
            if dist.get_rank() not in team and not _is_everyone(ranks):
                continue
            made = dist.new_group(
                team,
                backend=dist.get_backend(group),
                timeout=group_timeout(group),
                use_local_synchronization=not _is_everyone(ranks),
                group_desc=f"thinwire {scope}",
            )
            if dist.get_rank() in team:
                mine[scope] = made
    return mine


@torch.no_grad()
def broadcast_into(tensor: Tensor, source: int, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite `tensor` with the source rank's; by way of a copy, because a broadcast needs contiguous memory and
    channels_last and transposed layouts must stay."""
    values = tensor.detach().contiguous()
    dist.broadcast(values, src=source, group=group)
    tensor.detach().copy_(values)


def release_group(group: dist.ProcessGroup) -> None:
    """Free a private group's threads and sockets where that is safe and torch has not done it already."""
    alive = dist.is_initialized() and group in dist.distributed_c10d._world.pg_map
    if alive and _is_everyone(dist.get_process_group_ranks(group)):
        dist.destroy_process_group(group)


def _is_everyone(ranks: list[int]) -> bool:
    return len(ranks) == dist.get_world_size()


def group_timeout(group: dist.ProcessGroup, device: torch.device | None = None) -> timedelta | None:
    """The user's own timeout, so that a dead peer is noticed when they expect it."""
    try:
        return group._get_backend(device or torch.device("cpu")).options._timeout
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
