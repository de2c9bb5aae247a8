"""RedSync = RedSyncThreshold + Residual + AllGather.

Fang et al., "RedSync: Reducing Synchronization Bandwidth for Distributed Deep Learning Training System" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.methods.base import Sparsifier
from thinwire.select.base import Selector
from thinwire.select.redsync import RedSyncThreshold


@dataclass(frozen=True, kw_only=True)
class RedSync(Sparsifier):
    """A threshold searched between the mean and the largest magnitude of each tensor."""

    trimmed: bool = False
    """Trimmed top-k (exactly k entries) instead of the binary search (0.8 k to 1.25 k)."""
    finish: str = "promise"
    """"published" probes and sends as the circulating code does, up to 4 times `density`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.selector()

    def selector(self) -> Selector:
        return RedSyncThreshold(self.kept, self.finish, self.trimmed)
