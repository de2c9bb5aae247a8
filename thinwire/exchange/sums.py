"""Sums over ranks: the plain mean, and sums that one owner per piece adds up in rank order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.exchange.requests import EVERYONE, AllToAll, Gather, Place, Program, Sum

Rounding = Callable[[Tensor], Tensor]
AddUp = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Of the rows [world, n] that reached their owner: (their sum as it is gathered, what rounding lost of it)."""


def dense_mean(buffer: Tensor, place: Place, *, phase: str) -> Program[Tensor]:
    """Mean over ranks, in place where possible.

    Divides before summing, as DDP does, so that a narrow dtype does not overflow where DDP would not.
    """
    if not buffer.numel() or place.world == 1:
        return buffer
    (total,) = yield (Sum(divide(buffer, place.world), phase),)
    return total


def divide(buffer: Tensor, world: int) -> Tensor:
    """The buffer, in place, by `world`; the same bits on every device.

    By a tensor: torch multiplies by the reciprocal of a plain number on CUDA, which rounds twice where it is no power of two.
    """
    return buffer.div_(torch.full((), world, dtype=buffer.dtype, device=buffer.device))


def sum_by_owners(
    pieces: Tensor,
    phase: str,
    *,
    sum_dtype: torch.dtype,
    rounding: Rounding,
    control_bytes: int = 0,
    padding_bytes: int | Tensor = 0,
    own_padding_bytes: int | Tensor = 0,
    scope: str = EVERYONE,
) -> Program[tuple[Tensor, Tensor]]:
    """(sums of `pieces` [world, n] over ranks, what rounding lost of this rank's own row).

    An all-reduce in a narrow dtype rounds at every addition, and nobody can keep what that loses. It may also change
    the order of additions with the place in the buffer. Here every element is added in rank order and rounded once:

    1. Each rank sends row p to rank p.
    2. Rank p adds the rows it got in `sum_dtype`, rank 0's first, and rounds the sums.
    3. The sums are gathered, at the bytes of a ring all-reduce in the dtype of `pieces`.
    """

    def add_up(arrived: Tensor) -> tuple[Tensor, Tensor]:
        total = arrived[0].to(sum_dtype, copy=True)
        for piece in arrived[1:]:
            total += piece
        rounded = rounding(total)
        return rounded, total - rounded.to(sum_dtype)

    sums = yield from ask_owners(
        pieces,
        phase,
        add_up,
        control_bytes=control_bytes,
        padding_bytes=padding_bytes,
        own_padding_bytes=own_padding_bytes,
        scope=scope,
    )
    return sums


def ask_owners(
    pieces: Tensor,
    phase: str,
    add_up: AddUp,
    *,
    control_bytes: int = 0,
    padding_bytes: int | Tensor = 0,
    own_padding_bytes: int | Tensor = 0,
    scope: str = EVERYONE,
) -> Program[tuple[Tensor, Tensor]]:
    """The same where somebody else adds up."""
    world = len(pieces)
    (arrived,) = yield (
        AllToAll(
            pieces, phase, control_bytes=control_bytes, padding_bytes=padding_bytes, scope=scope
        ),
    )
    rounded, lost = add_up(arrived)
    own_control = control_bytes // world
    (gathered,) = yield (
        Gather(
            rounded,
            phase,
            control_bytes=own_control,
            padding_bytes=own_padding_bytes,
            scope=scope,
        ),
    )
    return gathered, lost


def in_rows(flat: Tensor, world: int, dtype: torch.dtype | None = None) -> Tensor:
    """[n] as [world, ceil(n / world)], filled up with zeros."""
    share = -(-flat.numel() // world)
    rows = torch.zeros(world, share, dtype=dtype or flat.dtype, device=flat.device)
    rows.view(-1)[: flat.numel()] = flat
    return rows
