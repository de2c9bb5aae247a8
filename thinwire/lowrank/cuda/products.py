"""KernelProducts: the arithmetic of a step by CUDA kernels, from the bucket and back into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.exchange.base import Outcome
from thinwire.lowrank.account import LowRankAccount, Sent
from thinwire.lowrank.batches import MatrixBatch
from thinwire.lowrank.cuda.group import GroupKernels
from thinwire.lowrank.cuda.kernels import has_products
from thinwire.lowrank.cuda.tables import Tables, is_turned
from thinwire.lowrank.layout import FactorLayout, Factors
from thinwire.lowrank.memory import LowRankMemory
from thinwire.lowrank.products import Products
from thinwire.lowrank.summing import Summed
from thinwire.plan.groups import Group

ALIGNMENT = 16
"""Bytes to which a bucket's address has to be a multiple."""
LARGEST = 2**27
"""Rows or columns; the numbers of a factor are counted by 32 bits."""


def can_multiply(
    batches: Sequence[MatrixBatch], group: Group, rank: int, gradient_dtype: torch.dtype
) -> bool:
    """Whether the kernels can do what torch does with these matrices."""
    return (
        group.dtype == torch.float32
        and all(
            is_turned(batch.shape) is not None
            and max(batch.shape.rows, batch.shape.columns) < LARGEST
            for batch in batches
        )
        and has_products(group.device, rank, gradient_dtype)
    )


@dataclass(eq=False)
class KernelSent(Sent):
    """Settled by one launch, in place: the bases and those they take the place of change places."""

    kernels: GroupKernels | None = None
    tables: Tables | None = None

    def settle(self, c: Tensor, bad: Tensor, before: Tensor | None) -> None:
        assert self.kernels is not None and self.tables is not None
        if self.replaced is None:
            self.replaced = self.memory.bases(self.layout, c)
        self.kernels.settle(
            self.tables,
            c,
            self.factors,
            self.known.flat,
            self.replaced,
            self.renewed,
            self.had,
            bad,
            before,
        )


class KernelProducts(Products):
    """The first product of a step takes the gradient from the bucket on the way, and the update goes back there."""

    def __init__(
        self,
        account: LowRankAccount,
        memory: LowRankMemory,
        kernels: GroupKernels,
        group: Group,
        bucket_flat: Tensor,
        ratio: Tensor | None,
        world: int,
    ) -> None:
        super().__init__(account, memory, len(group.slots), world)
        self.kernels = kernels
        self.group = group
        self.bucket_flat = bucket_flat
        self.ratio = ratio
        """What memory has to be multiplied with to be in the gradient's units."""
        self._status: Tensor | None = None
        """bool []: something that was received or computed is not finite."""

    def project(self, sent: FactorLayout, known: Factors, *, first: bool) -> Tensor:
        tables = self.kernels.tables(self.group, sent, known.layout)
        c = self.account.c
        if not first:
            buffer = torch.empty(sent.numel, dtype=c.dtype, device=c.device)
            self.kernels.project(tables, c, known.flat, buffer)
            return buffer
        buffer = torch.zeros(sent.numel + self.control, dtype=c.dtype, device=c.device)
        self.kernels.project(
            tables,
            c,
            known.flat,
            buffer,
            bucket=self.bucket_flat,
            flags=buffer[sent.numel :],
            ratio=self.ratio,
        )
        return buffer

    def receive(self, total: Tensor, *, first: bool) -> None:
        super().receive(total, first=first)
        if first:
            self._status = torch.zeros((), dtype=torch.bool, device=total.device)

    def orthogonalise(self, layout: FactorLayout, total: Tensor) -> Tensor:
        assert self._status is not None
        flag = total.numel() - 1 if total.numel() > layout.numel else -1
        return self.kernels.orthogonalise(total, layout.basis_tables, self._status, flag)

    def deliver(self, sent: FactorLayout, known: Factors, summed: Summed) -> Outcome:
        assert self._status is not None and self.had is not None and summed.part is not None
        kernels = self.kernels
        tables = kernels.tables(self.group, sent, known.layout)
        out = self.bucket_flat
        if not kernels.into_bucket:
            out = torch.zeros(self.group.numel, dtype=self.group.dtype, device=out.device)
        kernels.rebuild(tables, out, summed.total, known.flat, self.had, self._status)
        renewed = self.orthogonalise(sent, summed.total)
        self.account.sent = KernelSent(
            layout=sent,
            factors=summed.part[: sent.numel],
            known=known,
            renewed=renewed,
            had=self.had,
            memory=self.memory,
            kernels=kernels,
            tables=tables,
        )
        return Outcome(out, self._status, delivered=kernels.into_bucket)
