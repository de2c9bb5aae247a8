"""The two methods as their papers state them: one matrix, all ranks in one place. What the fast paths are tested against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TwoPhaseReference:
    """PowerSGD of one matrix; `q` is the first right factor, the same on all ranks."""

    def __init__(self, q: Tensor, world: int, shape: tuple[int, int]) -> None:
        self.q = q
        self.residuals = [torch.zeros(shape, dtype=q.dtype) for _ in range(world)]

    def step(self, gradients: Sequence[Tensor]) -> Tensor:
        compensated = [m + e for m, e in zip(gradients, self.residuals, strict=True)]
        p = torch.linalg.qr(_sum([a @ self.q for a in compensated])).Q
        factors = [a.T @ p for a in compensated]
        self.q = _sum(factors) / len(factors)
        self.residuals = [a - p @ f.T for a, f in zip(compensated, factors, strict=True)]
        return p @ self.q.T


class AlternatingReference:
    """ACP-SGD of one matrix; `p` and `q` are the first factors, the same on all ranks."""

    def __init__(self, p: Tensor, q: Tensor, world: int, shape: tuple[int, int]) -> None:
        self.p = p
        self.q = q
        self.residuals = [torch.zeros(shape, dtype=q.dtype) for _ in range(world)]

    def step(self, gradients: Sequence[Tensor], send: str) -> Tensor:
        """`send` is "p" or "q", alternately."""
        compensated = [m + e for m, e in zip(gradients, self.residuals, strict=True)]
        if send == "p":
            self.q = torch.linalg.qr(self.q).Q
            factors = [a @ self.q for a in compensated]
            self.p = _sum(factors)
            products = [f @ self.q.T for f in factors]
        else:
            self.p = torch.linalg.qr(self.p).Q
            factors = [a.T @ self.p for a in compensated]
            self.q = _sum(factors)
            products = [self.p @ f.T for f in factors]
        self.residuals = [a - local for a, local in zip(compensated, products, strict=True)]
        return self.p @ self.q.T / len(gradients)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)
