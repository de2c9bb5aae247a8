"""Alternating compression (ACP-SGD): one factor per step, so one sum over ranks per bucket and step."""

from __future__ import annotations

from collections.abc import Hashable

from thinwire.exchange.base import Outcome
from thinwire.exchange.requests import Program
from thinwire.lowrank.basis import name_hash
from thinwire.lowrank.compressor import LowRankCompressor, LowRankStep
from thinwire.lowrank.layout import Factors
from thinwire.lowrank.matrices import Matrices

OTHER_SIDE = {"p": "q", "q": "p"}


class AlternatingCompressor(LowRankCompressor):
    """Per matrix, with A = gradient + residual on this rank:

    1. In a "p" step F = A Q, in a "q" step F = A^T P; Q and P are orthonormal and the same on all ranks.
    2. Sum F over ranks.
    3. The update is mean(F) Q^T or P mean(F)^T; the residual is A less this rank's own F Q^T or P F^T.
    4. The orthonormalised sum is the P (or Q) of the next step.

    Which step is which depends on the parameter's name too, so that long and short factors mix in every step.
    """

    sides = ("p", "q")

    def mode(self, name: str, count: int) -> Hashable:
        return "p" if (count + name_hash(name)) % 2 == 0 else "q"

    def values(self, shape: Matrices, mode: Hashable) -> int:
        return shape.count * shape.side(str(mode)) * shape.rank(self.rank)

    def run(self, now: LowRankStep) -> Program[Outcome]:
        sides = [str(batch.mode) for batch in now.table.batches]
        sent = self.layout(now, sides)
        other = self.layout(now, [OTHER_SIDE[side] for side in sides])
        known = Factors(other, self.memory.bases(other, now.account.c))
        buffer = now.products.project(sent, known, first=True)
        summed = yield from now.sum.run(buffer, "lowrank", now.products.control)
        now.products.receive(summed.total, first=True)
        return now.products.deliver(sent, known, summed)
