"""What several programs ask for in one round travels as one collective, and sums can be made in rank order.

A bucket holds matrices sent as factors beside vectors that stay dense, and buckets travel together. Each small sum or payload
would cost the latency of a collective once more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.exchange.requests import (
    AllToAll,
    Batch,
    Collective,
    Gather,
    Program,
    Replies,
    Request,
    Sum,
    Swap,
    together,
)
from thinwire.exchange.sums import in_rows, sum_by_owners

T = TypeVar("T")


def fuse_requests(program: Program[T]) -> Program[T]:
    """The same program, asking for one all-reduce where it asked for several of one dtype among the same ranks, and for one
    all-gather of payloads, for one all-to-all of messages, and for one message to the same rank.

    Every rank fuses alike, because batches are alike on all ranks. A backend may add in another order than it would
    apart, as it may in another bucketing; `in_rank_order` keeps bits from depending on that.
    """
    try:
        batch = next(program)
        while True:
            if len(batch) == 1:
                batch = program.send((yield batch))
                continue
            fused = FusedBatch.of(batch)
            replies = yield fused.requests
            batch = program.send(fused.split(replies))
    except StopIteration as finished:
        return finished.value


@dataclass(frozen=True, eq=False)
class FusedBatch:
    """A batch in which requests that can travel together do."""

    batch: Batch
    members: tuple[tuple[int, ...], ...]
    """Per request that is made: the places in the batch of those it stands for."""
    requests: Batch

    @staticmethod
    def of(batch: Batch) -> FusedBatch:
        members: dict[Hashable, list[int]] = {}
        for index, request in enumerate(batch):
            members.setdefault(_fusing_key(index, request), []).append(index)
        requests = tuple(_fuse([batch[index] for index in chosen]) for chosen in members.values())
        return FusedBatch(batch, tuple(map(tuple, members.values())), requests)

    def split(self, replies: Replies) -> list[Tensor]:
        """The replies to the requests of the batch, in its order; views where they came in one buffer."""
        found: dict[int, Tensor] = {}
        for chosen, reply in zip(self.members, replies, strict=True):
            if len(chosen) == 1:
                found[chosen[0]] = reply
                continue
            if isinstance(self.batch[chosen[0]], Swap) and not reply.numel():
                # Nothing arrives at who only sends.
                found.update(dict.fromkeys(chosen, reply))
                continue
            asked = [_row(self.batch[index]) for index in chosen]
            pieces = reply.split([row.shape[-1] for row in asked], dim=-1)
            by_rank = reply.dim() > 1
            for index, piece in zip(chosen, pieces, strict=True):
                found[index] = piece if by_rank else piece.view(_tensor(self.batch[index]).shape)
        return [found[index] for index in range(len(self.batch))]


def _fusing_key(index: int, request: Request) -> Hashable:
    """Requests with the same answer travel together."""
    if isinstance(request, Sum) or (isinstance(request, Gather | AllToAll) and request.apart):
        return request.kind, request.scope, request.tensor.dtype, request.tensor.device
    if isinstance(request, Swap) and request.pattern:
        tensor = request.tensor
        return request.kind, request.scope, tensor.dtype, tensor.device, request.pattern
    return index


def _tensor(request: Request) -> Tensor:
    assert isinstance(request, Collective)
    return request.tensor


def _row(request: Request) -> Tensor:
    """What can be put behind that of others: the tensor in one row, or with a row for every rank."""
    tensor = _tensor(request)
    return tensor if isinstance(request, AllToAll) else tensor.reshape(-1)


def _fuse(requests: Sequence[Request]) -> Request:
    if len(requests) == 1:
        return requests[0]
    members = [request for request in requests if isinstance(request, Collective)]
    padding: int | Tensor = 0
    for request in members:
        padding = padding + request.padding_bytes
    return replace(
        members[0],
        tensor=torch.cat([_row(request) for request in members], -1),
        phase="+".join(dict.fromkeys(request.phase for request in members)),
        control_bytes=sum(request.control_bytes for request in members),
        padding_bytes=padding,
    )


def in_rank_order(program: Program[T], world_of: Callable[[str], int]) -> Program[T]:
    """The same program, with all its sums of floating-point numbers added in rank order, element by element.

    A backend's all-reduce may change the order of additions with the place in the buffer, so that the same gradient in
    another bucketing would give other bits. `world_of` says how many ranks a scope has.
    """
    return by_owners(program, world_of, lambda request: request.tensor.dtype.is_floating_point)


def by_owners(
    program: Program[T], world_of: Callable[[str], int], chosen: Callable[[Sum], bool]
) -> Program[T]:
    """The same program, in which the sums that are `chosen` are added up by one owner per piece, and gathered."""
    try:
        batch = next(program)
        while True:
            ordered = [
                _by_owners(one, world_of(one.scope))
                if isinstance(one, Sum) and chosen(one)
                else _as_it_is(one)
                for one in batch
            ]
            replies = yield from together(ordered)
            batch = program.send(replies)
    except StopIteration as finished:
        return finished.value


def _as_it_is(request: Request) -> Program[Any]:
    (reply,) = yield (request,)
    return reply


def _by_owners(request: Sum, world: int) -> Program[Tensor]:
    tensor = request.tensor
    rows = in_rows(tensor.reshape(-1), world)
    filled = (rows.numel() - tensor.numel()) * tensor.element_size()
    padding = request.padding_bytes + filled
    summing = sum_by_owners(
        rows,
        request.phase,
        sum_dtype=tensor.dtype,
        rounding=lambda total: total,
        control_bytes=request.control_bytes,
        padding_bytes=padding,
        own_padding_bytes=padding // world,
        scope=request.scope,
    )
    gathered, _ = yield from summing
    return gathered.reshape(-1)[: tensor.numel()].view(tensor.shape)
