"""Dense exchange: the plain mean of a buffer over all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.exchange.requests import AllGather, AllReduce, AllToAll, Place, Program


def dense_mean(buffer: Tensor, place: Place, *, deterministic: bool, phase: str) -> Program[Tensor]:
    """Mean over ranks, in place where possible.

    Divides before summing, as DDP does, so that a narrow dtype does not overflow where DDP would not.
    """
    if not buffer.numel() or place.world == 1:
        return buffer
    buffer.div_(place.world)
    if deterministic:
        total = yield from ordered_sum(buffer, place, phase=phase)
        return total
    (total,) = yield (AllReduce(buffer, phase),)
    return total


def ordered_sum(buffer: Tensor, place: Place, *, phase: str) -> Program[Tensor]:
    """Sum over ranks in rank order, element by element, at the bytes of a ring all-reduce.

    A backend's all-reduce may change the order of additions with the position in the buffer, so that the same
    gradient in another bucketing gives other bits.

    1. Each rank sends piece p of its buffer to rank p.
    2. Rank p adds the pieces it got, rank 0 first.
    3. The sums are gathered.
    """
    numel = buffer.numel()
    share = -(-numel // place.world)
    padded = torch.zeros(place.world, share, dtype=buffer.dtype, device=buffer.device)
    padded.view(-1)[:numel] = buffer
    padding = (padded.numel() - numel) * buffer.element_size()
    (pieces,) = yield (AllToAll(padded, phase, padding),)
    total = pieces[0].clone()
    for piece in pieces[1:]:
        total += piece
    (gathered,) = yield (AllGather(total, phase, padding // place.world),)
    return gathered.reshape(-1)[:numel]
