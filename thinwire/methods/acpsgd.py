"""ACP-SGD: alternately the left and the right factor of PowerSGD, one per step.

Zhang, Zhang, Shi, Chu, Li, "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning"
(ICDCS'23).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.compress.base import Compressor
from thinwire.lowrank.alternating import AlternatingCompressor
from thinwire.methods.lowrank import LowRankMethod


@dataclass(frozen=True, kw_only=True)
class ACPSGD(LowRankMethod):
    """One factor in every step: on average (n + m) r / 2 numbers for an n x m matrix, in one sum."""

    factors_per_step: ClassVar[int] = 1

    def compressor(self) -> Compressor:
        return AlternatingCompressor(self.rank, self.wire, self.per_host, self.start_memory())
