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

SMALL_SUM = 8
"""A sum joins payloads of at least this many times its bytes. Gathered it costs half the number of ranks more than summed on the
way, as the payloads do; a collective of its own costs its latency and the host's time for it."""


def fuse_requests(program: Program[T]) -> Program[T]:
    """The same program, asking for one all-reduce where it asked for several of one dtype among the same ranks, and for one
    all-gather of payloads, small sums among them.

    Every rank fuses alike, because batches are alike on all ranks. A backend may add in another order than it would
    apart, as it may in another bucketing; a program whose bits must not depend on that asks for no all-reduce.
    """
    try:
        batch = next(program)
        while True:
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
        joined = _sums_that_join(batch)
        members: dict[Hashable, list[int]] = {}
        for which, request in enumerate(batch):
            key = joined.get(which) or _companions(which, request)
            members.setdefault(key, []).append(which)
        for chosen in members.values():
            # Payloads first: kernels load theirs as whole words.
            chosen.sort(key=lambda which: isinstance(batch[which], AllReduce))
        requests = tuple(_fuse([batch[which] for which in chosen]) for chosen in members.values())
        return FusedBatch(batch, tuple(map(tuple, members.values())), requests)

    def split(self, replies: Replies) -> list[Tensor]:
        """The replies to the requests of the batch, in its order; views where they came in one buffer."""
        found: dict[int, Tensor] = {}
        for chosen, made, reply in zip(self.members, self.requests, replies, strict=True):
            if len(chosen) == 1:
                found[chosen[0]] = reply
                continue
            asked = [self.batch[which] for which in chosen]
            gathered = isinstance(made, AllGather)
            if gathered:
                # The same views for all virtual ranks: what they compute from a reply alike goes by the reply itself.
                pieces = alike(reply, partial(_cut, reply, asked))
            else:
                pieces = reply.split([request.tensor.numel() for request in asked])
            for which, request, piece in zip(chosen, asked, pieces, strict=True):
                summed = isinstance(request, AllReduce)
                if summed and gathered:
                    piece = piece.sum(0)
                found[which] = piece.view(request.tensor.shape) if summed else piece
        return [found[which] for which in range(len(self.batch))]


def _cut(reply: Tensor, requests: Sequence[Request]) -> Sequence[Tensor]:
    """What was gathered for each of the requests, in its own dtype."""
    pieces = reply.split([request.tensor.nbytes for request in requests], dim=-1)
    return [
        piece if piece.dtype == request.tensor.dtype else piece.view(request.tensor.dtype)
        for piece, request in zip(pieces, requests, strict=True)
    ]


def _sums_that_join(batch: Batch) -> dict[int, Hashable]:
    """Sums so small beside the payloads of this batch that they are gathered with them and added up here: which, and with whom."""
    payloads: dict[Hashable, int] = {}
    for which, request in enumerate(batch):
        if isinstance(request, AllGather) and request.apart:
            key = _companions(which, request)
            payloads[key] = payloads.get(key, 0) + request.tensor.nbytes
    if not payloads:
        return {}
    sums: dict[tuple[str, torch.device], list[int]] = {}
    for which, request in enumerate(batch):
        if isinstance(request, AllReduce) and request.tensor.dtype == torch.float32:
            sums.setdefault((request.scope, request.tensor.device), []).append(which)
    joined: dict[int, Hashable] = {}
    for place, chosen in sums.items():
        key = (AllGather.kind, *place)
        small = sum(batch[which].tensor.nbytes for which in chosen)
        if small <= payloads.get(key, 0) // SMALL_SUM:
            joined |= dict.fromkeys(chosen, key)
    return joined


def _companions(which: int, request: Request) -> Hashable:
    """Requests with the same answer travel together."""
    if isinstance(request, AllGather) and request.apart:
        return request.kind, request.scope, request.tensor.device
    if isinstance(request, AllReduce):
        return request.kind, request.scope, request.tensor.device, request.tensor.dtype
    return which


def _fuse(requests: Sequence[Request]) -> Request:
    if len(requests) == 1:
        return requests[0]
    flat = [request.tensor.reshape(-1) for request in requests]
    if isinstance(requests[0], AllGather):
        flat = [one if one.dtype == torch.uint8 else one.view(torch.uint8) for one in flat]
    padding: int | Tensor = 0
    for request in requests:
        padding = padding + request.padding_bytes
    return replace(
        requests[0],
        tensor=torch.cat(flat),
        phase="+".join(dict.fromkeys(request.phase for request in requests)),
        control_bytes=sum(request.control_bytes for request in requests),
        padding_bytes=padding,
    )
