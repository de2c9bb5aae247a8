"""Two-phase compression (PowerSGD): P, then Q, in every step."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from thinwire.exchange.base import Outcome
from thinwire.exchange.requests import Program
from thinwire.lowrank.basis import draw
from thinwire.lowrank.batches import MatrixBatch
from thinwire.lowrank.compressor import LowRankCompressor, LowRankStep, Table
from thinwire.lowrank.layout import FactorLayout, Factors
from thinwire.lowrank.matrices import Matrices
from thinwire.memory.base import MemoryState


class TwoPhaseCompressor(LowRankCompressor):
    """Per matrix, with A = gradient + residual on this rank and Q of the last step:

    1. Sum A Q over ranks; P = its orthonormal basis.
    2. Sum F = A^T P over ranks.
    3. The update is P mean(F)^T; the residual is A less this rank's own P F^T.
    4. The orthonormalised sum of F is the Q of the next step.

    In a step that renews the subspace, steps 1 and 2 run once more, first, from fresh random numbers: two subspace
    iterations on the mean of A, which forget a subspace that noise has driven away from it.
    """

    sides = ("q",)

    def __init__(
        self,
        rank: int,
        wire: str,
        per_host: int | None,
        refresh_every: int | None,
        memory: MemoryState | None = None,
    ) -> None:
        super().__init__(rank, wire, per_host, memory)
        self.refresh_every = refresh_every

    def mode(self, name: str, count: int) -> Hashable:
        """Whether the subspace is renewed."""
        return self.refresh_every is not None and count > 0 and count % self.refresh_every == 0

    def renews(self, table: Table) -> bool:
        return any(batch.mode for batch in table.batches)

    def values(self, shape: Matrices, mode: Hashable) -> int:
        once = shape.count * (shape.rows + shape.columns) * shape.rank(self.rank)
        return 2 * once if mode else once

    def run(self, now: LowRankStep) -> Program[Outcome]:
        count = len(now.table.batches)
        left, right = self.layout(now, ["p"] * count), self.layout(now, ["q"] * count)
        start = Factors(right, self.memory.bases(right, now.account.c))
        if self.renews(now.table):
            start = yield from self._refresh(now, left, start)
        products = now.products
        buffer = products.project(left, start, first=True)
        first = yield from now.sum.run(buffer, "lowrank/p", products.control, with_part=False)
        products.receive(first.total, first=True)
        basis = Factors(left, products.orthogonalise(left, first.total))
        buffer = products.project(right, basis, first=False)
        second = yield from now.sum.run(buffer, "lowrank/q")
        products.receive(second.total, first=False)
        return products.deliver(right, basis, second)

    def _refresh(self, now: LowRankStep, left: FactorLayout, start: Factors) -> Program[Factors]:
        """`start` with the bases of the renewing batches replaced."""
        chosen = [index for index, batch in enumerate(now.table.batches) if batch.mode]
        halves = left.only(chosen), start.layout.only(chosen)
        bases = Factors(halves[1], torch.cat([self._fresh(b, now) for b in halves[1].batches]))
        for half in halves:
            buffer = now.products.project(half, bases, first=False)
            summed = yield from now.sum.run(buffer, "lowrank/refresh", with_part=False)
            bases = Factors(half, now.products.orthogonalise(half, summed.total))
        renewed = Factors(start.layout, start.flat.clone())
        for index, basis in zip(chosen, bases.sections, strict=True):
            renewed.sections[index].copy_(basis)
        return renewed

    def _fresh(self, batch: MatrixBatch, now: LowRankStep) -> Tensor:
        drawn = [
            shape.to_memory(
                draw(f"{name}/q/{now.counts[name]}", (shape.count, shape.columns, batch.rank))
            )
            for name, shape in batch.members
        ]
        return torch.cat(drawn).reshape(-1).to(now.account.c.device, now.account.c.dtype)
