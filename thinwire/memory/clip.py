"""Clip: local gradient clipping, before a memory accumulates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.described import Described
from thinwire.errors import UsageError
from thinwire.validate import check_bool, check_positive_number


@dataclass(frozen=True, kw_only=True)
class Clip(Described):
    """Either every element to [-value, value], or every tensor to an L2 norm of at most `norm`.

    `by_workers` scales `norm` by workers^-1/2, so that the sum of all workers' gradients keeps it in mean. A hook
    sees one bucket at a time, so norms are per tensor, not of the whole gradient as in DGC's paper.
    """

    value: float | None = None
    """The largest magnitude of an element."""
    norm: float | None = None
    """The largest norm of a tensor."""
    by_workers: bool = False
    """Divide `norm` by the root of the number of workers."""

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

    def apply(
        self, gradients: Sequence[Tensor], loss_scale: Tensor | None, world: int
    ) -> list[Tensor]:
        """The same gradients, clipped; limits follow the GradScaler."""
        scale = loss_scale if loss_scale is not None else 1.0
        if self.value is not None:
            bound = self.value * scale
            return [
                g.clamp(-bound, bound)
                if isinstance(bound, float)
                else torch.clamp(g, min=-bound.to(g.dtype), max=bound.to(g.dtype))
                for g in gradients
            ]
        assert self.norm is not None
        limit = self.norm / math.sqrt(world) if self.by_workers else self.norm
        # 1e-6 as in torch's own clipping, in the units of the loss scale.
        factors = [
            (limit * scale / (torch.linalg.vector_norm(g.float()) + 1e-6 * scale)).clamp(max=1.0)
            for g in gradients
        ]
        return [g * f.to(g.dtype) for g, f in zip(gradients, factors, strict=True)]
