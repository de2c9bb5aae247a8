"""SIDCo = SIDCoThreshold + Residual + AllGather.

Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for Distributed Training Systems"
(MLSys 2021).
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.methods.base import Sparsifier
from thinwire.select.base import Selector
from thinwire.select.sidco import SIDCoThreshold


@dataclass(frozen=True, kw_only=True)
class SIDCo(Sparsifier):
    """Entries beyond a threshold fitted to the tail of each tensor; 0.8 to 1.25 times `density` of them."""

    distribution: str = "pareto"
    """"exponential", "gamma" or "pareto": what magnitudes are taken to follow."""
    stages: int = 2
    """How often the tail is fitted anew; the first number if `adapt`."""
    adapt: bool = False
    """Change the number of stages of each tensor by what survived; reads counts back, so CUDA waits."""
    finish: str = "promise"
    """"published" sends whatever survives the estimate, up to 4 times `density`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.selector()

    @property
    def host_sync_free(self) -> bool:
        return super().host_sync_free and not self.adapt

    def selector(self) -> Selector:
        return SIDCoThreshold(self.kept, self.finish, self.distribution, self.stages, self.adapt)
