"""Threshold = FixedThreshold + Residual + AllGather: whatever is large enough."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.methods.base import Sparsifier
from thinwire.select.base import Selector
from thinwire.select.threshold_fixed import FixedThreshold


@dataclass(frozen=True, kw_only=True)
class Threshold(Sparsifier):
    """Entries of magnitude `threshold` or more, at least one and at most `density` of each tensor."""

    threshold: float = 0.01
    """In the units of the gradients as they arrive: under a GradScaler, of scaled gradients."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.selector()

    def selector(self) -> Selector:
        return FixedThreshold(self.kept, threshold=self.threshold)
