"""KernelProducts: the arithmetic of a step by CUDA kernels, from the bucket and back into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress.base import BUCKET_ALIGNMENT, Terms
from thinwire.exchange.base import Outcome
from thinwire.layout import Group
from thinwire.lowrank.account import LowRankAccount, Sent
from thinwire.lowrank.batches import MatrixBatch
from thinwire.lowrank.cuda.group import GroupKernels
from thinwire.lowrank.cuda.kernels import has_products
from thinwire.lowrank.cuda.tables import LowRankTables, is_turned
from thinwire.lowrank.layout import FactorLayout, Factors
from thinwire.lowrank.memory import LowRankMemory
from thinwire.lowrank.products import Products
from thinwire.lowrank.summing import Summed
from thinwire.memory.store import Buffers

LARGEST = 2**27
"""Rows or columns: kernels count the numbers of a factor with 32 bits."""


def reason_against(
    batches: Sequence[MatrixBatch], group: Group, rank: int, terms: Terms
) -> str | None:
    """Why the kernels cannot do what torch does with these matrices, as a sentence; None if they can."""
    if not terms.aligned:
        return f"the kernels read buckets that begin at a multiple of {BUCKET_ALIGNMENT} bytes"
    if group.dtype != torch.float32:
        return f"the kernels do not multiply {group.dtype}"
    for shape in (batch.shape for batch in batches):
        if is_turned(shape) is None or max(shape.rows, shape.columns) >= LARGEST:
            return f"the kernels do not know matrices that lie as these of {shape.rows} x {shape.columns}"
    if not has_products(group.device, rank, terms.gradient_dtype):
        return f"there are no kernels for rank {rank} and {terms.gradient_dtype} on {group.device}"
    return None


@dataclass(eq=False)
class KernelSent(Sent):
    """Settled by one launch, in place: new and old bases swap contents."""

    kernels: GroupKernels | None = None
    tables: LowRankTables | None = None

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
        buffers: Buffers,
        world: int,
    ) -> None:
        super().__init__(account, memory, len(group.slots), world)
        self.kernels = kernels
        self.group = group
        self.bucket_flat = bucket_flat
        self.buffers = buffers
        """What memory held before the step, and where it goes on."""
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
            held=self.buffers.held,
            flags=buffer[sent.numel :],
            ratio=self.buffers.ratio,
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
