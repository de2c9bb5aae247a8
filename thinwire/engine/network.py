"""Network: performs requests on a torch process group."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.engine.failures import exchange_failed, failing_as, name_exchange
from thinwire.engine.groups import DEFAULT_TIMEOUT, group_timeout, host_groups, release_groups
from thinwire.engine.stalls import StallWatch
from thinwire.errors import ExchangeError
from thinwire.exchange.requests import (
    EVERYONE,
    AllToAll,
    AllToAllUneven,
    Batch,
    Broadcast,
    Collective,
    Common,
    Gather,
    Place,
    Request,
    Sum,
    Swap,
)
from thinwire.layout import local_part
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
        self.place = place_in(group)
        self.ledger = ledger
        self.groups = {EVERYONE: group, **(scopes or {})}
        self.per_host: int | None = None
        timeout = group_timeout(group) or DEFAULT_TIMEOUT
        self.stalls = StallWatch(timeout.total_seconds())
        self.places = {scope: place_in(member) for scope, member in self.groups.items()}

    @property
    def group(self) -> dist.ProcessGroup:
        """Over all ranks."""
        return self.groups[EVERYONE]

    def add_hosts(self, per_host: int) -> None:
        """Make the groups for requests inside and between hosts; every rank calls it at the same point."""
        if per_host == self.per_host:
            return
        made = host_groups(self.group, per_host)
        self.per_host = per_host
        self.groups.update(made)
        self.places.update({scope: place_in(member) for scope, member in made.items()})

    def perform(self, batch: Batch, what: str = "") -> list[Any]:
        """Issue all requests, then wait for all: on gloo until done, on NCCL only the current stream waits.

        `what` says on whose behalf, for the sentence about an exchange that fails or waits.
        """
        name = partial(self.name_of, batch, what)
        try:
            with self.stalls.watching(name):
                return self._perform(batch)
        except ExchangeError:
            raise
        except Exception as error:
            raise exchange_failed(name(), error) from error

    def name_of(self, batch: Batch, what: str) -> str:
        """An exchange in the words of a sentence."""
        asked = [one.phase for one in batch if isinstance(one, Collective) and one.phase]
        phases = " and ".join(sorted({phase for one in asked for phase in one.split("+")}))
        owner = f" for the bucket of {what}" if what else ""
        return name_exchange(self.place, f"{phases or 'data'}{owner}")

    def close(self) -> None:
        """End the groups. Nothing here holds them afterwards: their sockets are open as long as they live."""
        self.stalls.close()
        groups, self.groups = self.groups, {}
        release_groups(groups)

    def _perform(self, batch: Batch) -> list[Any]:
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

    def _issue(self, request: Request) -> tuple[Any, Any]:
        if isinstance(request, Common):
            return _Several([]), request.make()
        assert isinstance(request, Collective)
        tensor = request.tensor.contiguous()
        world = self._place(request).world
        group = self.groups[request.scope]
        work: dist.Work | None
        match request:
            case Sum():
                work = dist.all_reduce(tensor, group=group, async_op=True)
                reply = tensor
            case Gather():
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
    """Pieces of work, or none, that are waited for together."""

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


@torch.no_grad()
def broadcast_into(tensor: Tensor, source: int, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite `tensor` with the source rank's; by way of a copy, because a broadcast needs contiguous memory and
    channels_last and transposed layouts must stay."""
    values = tensor.detach().contiguous()
    with failing_as(group, "parameters"):
        dist.broadcast(values, src=source, group=group)
    tensor.detach().copy_(values)


def share_from_first(
    tensors: Iterable[Any], group: dist.ProcessGroup, inside: dist.ProcessGroup | None = None
) -> None:
    """Give all ranks of a group what its first one has: replicas that start apart stay apart.

    Tensors that are whole on every rank `inside` a node are first those of the node's first rank.
    """
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        local = local_part(tensor)
        if inside is not None and local is tensor:
            broadcast_into(local, dist.get_process_group_ranks(inside)[0], inside)
        broadcast_into(local, dist.get_process_group_ranks(group)[0], group)
