"""Fused requests: what several programs ask for in one round travels as one collective.

A bucket holds matrices sent as factors beside vectors that stay dense, and buckets travel together. Each small sum or payload
would cost the latency of a collective once more.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.exchange.lockstep import alike
from thinwire.exchange.requests import AllGather, AllReduce, Batch, Program, Replies, Request

T = TypeVar("T")


def fuse_requests(program: Program[T]) -> Program[T]:
    """The same program, asking for one all-reduce where it asked for several of one dtype among the same ranks, and for one
    all-gather of payloads.

    Every rank fuses alike, because batches are alike on all ranks. A backend may add in another order than it would
    apart, as it may in another bucketing; a program whose bits must not depend on that asks for no all-reduce.
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
    """Per request that is made: which ones of the batch it stands for."""
    requests: Batch

    @staticmethod
    def of(batch: Batch) -> FusedBatch:
        members: dict[Hashable, list[int]] = {}
        for which, request in enumerate(batch):
            members.setdefault(_companions(which, request), []).append(which)
        requests = tuple(_fuse([batch[which] for which in chosen]) for chosen in members.values())
        return FusedBatch(batch, tuple(map(tuple, members.values())), requests)

    def split(self, replies: Replies) -> list[Tensor]:
        """The replies to the requests of the batch, in its order; views where they came in one buffer."""
        found: dict[int, Tensor] = {}
        for chosen, reply in zip(self.members, replies, strict=True):
            if len(chosen) == 1:
                found[chosen[0]] = reply
                continue
            asked = [self.batch[which].tensor for which in chosen]
            cut = partial(reply.split, [tensor.numel() for tensor in asked], dim=-1)
            gathered = isinstance(self.batch[chosen[0]], AllGather)
            # The same views for all virtual ranks: what they compute from a reply alike goes by the reply itself.
            pieces = alike(reply, cut) if gathered else cut()
            for which, tensor, piece in zip(chosen, asked, pieces, strict=True):
                found[which] = piece if gathered else piece.view(tensor.shape)
        return [found[which] for which in range(len(self.batch))]


def _companions(which: int, request: Request) -> Hashable:
    """Requests with the same answer travel together."""
    if isinstance(request, AllReduce) or (isinstance(request, AllGather) and request.apart):
        return request.kind, request.scope, request.tensor.dtype, request.tensor.device
    return which


def _fuse(requests: Sequence[Request]) -> Request:
    if len(requests) == 1:
        return requests[0]
    padding: int | Tensor = 0
    for request in requests:
        padding = padding + request.padding_bytes
    return replace(
        requests[0],
        tensor=torch.cat([request.tensor.reshape(-1) for request in requests]),
        phase="+".join(dict.fromkeys(request.phase for request in requests)),
        control_bytes=sum(request.control_bytes for request in requests),
        padding_bytes=padding,
    )
