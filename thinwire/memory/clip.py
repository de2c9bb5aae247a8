"""Clip: local gradient clipping, before a memory accumulates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from thinwire.compressor import GroupStep
from thinwire.errors import UsageError
from thinwire.validate import check_bool, check_positive_number


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Either every element to [-value, value], or every tensor to an L2 norm of at most `norm`.

    `by_workers` scales `norm` by workers^-1/2, so that the sum of all workers' gradients keeps it in mean. A hook
    sees one bucket at a time, so norms are per tensor, not of the whole gradient as in DGC's paper.
    """

    value: float | None = None
    norm: float | None = None
    by_workers: bool = False

    def __post_init__(self) -> None:
        if (self.value is None) == (self.norm is None):
            raise UsageError(
                f"value is {self.value!r} and norm is {self.norm!r}; Clip takes exactly one of them"
            )
        check_positive_number(
            *(("norm", self.norm) if self.value is None else ("value", self.value))
        )
        check_bool("by_workers", self.by_workers)
        if self.by_workers and self.norm is None:
            raise UsageError(
                "by_workers is True, which goes only with norm; value clips each element"
            )

    def apply(self, step: GroupStep) -> GroupStep:
        """The same step with clipped gradients; limits follow the GradScaler."""
        scale = step.scale if step.scale is not None else 1.0
        if self.value is not None:
            bound = self.value * scale
            clipped = [
                g.clamp(-bound, bound)
                if isinstance(bound, float)
                else torch.clamp(g, min=-bound.to(g.dtype), max=bound.to(g.dtype))
                for g in step.gradients
            ]
            return replace(step, gradients=clipped)
        assert self.norm is not None
        limit = self.norm / math.sqrt(step.place.world) if self.by_workers else self.norm
        # 1e-6 as in torch's own clipping, in the units of the loss scale.
        factors = [
            (limit * scale / (torch.linalg.vector_norm(g.float()) + 1e-6 * scale)).clamp(max=1.0)
            for g in step.gradients
        ]
        clipped = [g * f.to(g.dtype) for g, f in zip(step.gradients, factors, strict=True)]
        return replace(step, gradients=clipped)
