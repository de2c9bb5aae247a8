"""PowerSGD: rank-r factors in two phases, with error feedback and warm start.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(NeurIPS'19). `subspace_refresh_every` follows PowerSGD+ (Xie, Chen, Yuan, arXiv 2509.11254).
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compress.base import Compressor
from thinwire.lowrank.two_phase import TwoPhaseCompressor
from thinwire.methods.lowrank import LowRankMethod
from thinwire.validate import check_positive_int


@dataclass(frozen=True, kw_only=True)
class PowerSGD(LowRankMethod):
    """Both factors in every step: (n + m) r numbers for an n x m matrix, in two sums that follow each other."""

    subspace_refresh_every: int | None = None
    """Start from a fresh subspace every so many steps, at twice the bytes of an ordinary step; None = never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.subspace_refresh_every is not None:
            check_positive_int("subspace_refresh_every", self.subspace_refresh_every)

    def compressor(self) -> Compressor:
        return TwoPhaseCompressor(
            self.rank, self.wire, self.per_host, self.subspace_refresh_every, self.start_memory()
        )
