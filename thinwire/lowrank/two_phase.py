"""Two-phase compression (PowerSGD): P, then Q, in every step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from thinwire.exchange.base import Outcome
from thinwire.exchange.requests import Program
from thinwire.lowrank.basis import draw
from thinwire.lowrank.batches import MatrixBatch
from thinwire.lowrank.compressor import LowRankCompressor, Round, is_finite
from thinwire.lowrank.layout import FactorLayout
from thinwire.lowrank.matrices import Matrices


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

    def __init__(self, rank: int, wire: str, refresh_every: int | None) -> None:
        super().__init__(rank, wire)
        self.refresh_every = refresh_every

    def mode(self, name: str, count: int) -> Hashable:
        """Whether the subspace is renewed."""
        return self.refresh_every is not None and count > 0 and count % self.refresh_every == 0

    def values(self, shape: Matrices, mode: Hashable) -> int:
        once = shape.count * (shape.rows + shape.columns) * shape.rank(self.rank)
        return 2 * once if mode else once

    def run(self, now: Round) -> Program[Outcome]:
        count = len(now.table.batches)
        left, right = self.layout(now, ["p"] * count), self.layout(now, ["q"] * count)
        starts = right.sections(self.memory.bases(right, now.account.c))
        if any(batch.mode for batch in now.table.batches):
            starts = yield from self._refresh(now, left, right, starts)
        buffer = self.project(now, left, starts, with_flags=True)
        first = yield from now.sum.run(buffer, "lowrank/p", now.control)
        now.account.used = first.total[-now.control : -1] > 0
        bases = left.sections(left.orthogonalise(first.total))
        buffer = self.project(now, right, bases, with_flags=False)
        second = yield from now.sum.run(buffer, "lowrank/q", 0)
        update = self.deliver(now, right, bases, second)
        return Outcome(update, ~(is_finite(first.total) & is_finite(second.total)))

    def _refresh(
        self, now: Round, left: FactorLayout, right: FactorLayout, starts: Sequence[Tensor]
    ) -> Program[list[Tensor]]:
        """`starts` with the bases of the renewing batches replaced."""
        chosen = [which for which, batch in enumerate(now.table.batches) if batch.mode]
        parts = [left.only(chosen), right.only(chosen)]
        bases = [self._fresh(batch, now) for batch in parts[0].batches]
        for part in parts:
            buffer = self.project(now, part, bases, with_flags=False)
            summed = yield from now.sum.run(buffer, "lowrank/refresh", 0)
            bases = part.sections(part.orthogonalise(summed.total))
        renewed = dict(zip(chosen, bases, strict=True))
        return [renewed.get(which, start) for which, start in enumerate(starts)]

    def _fresh(self, batch: MatrixBatch, now: Round) -> Tensor:
        drawn = [
            shape.to_memory(
                draw(f"{name}/q/{now.counts[name]}", (shape.count, shape.columns, batch.rank))
            )
            for name, shape in batch.members
        ]
        return torch.cat(drawn).to(now.account.c.device, now.account.c.dtype)
