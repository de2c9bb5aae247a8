"""GaussianK = GaussianThreshold + Residual + AllGather.

Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.methods.base import Sparsifier
from thinwire.select.base import Selector
from thinwire.select.gaussian import GaussianThreshold


@dataclass(frozen=True, kw_only=True)
class GaussianK(Sparsifier):
    """Entries beyond a threshold that takes each tensor to be normal; 0.8 to 1.25 times `density` of them."""

    finish: str = "promise"
    """"published" sends whatever survives the paper's four turns, up to 4 times `density`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.selector()

    def selector(self) -> Selector:
        return GaussianThreshold(self.kept, self.finish)
