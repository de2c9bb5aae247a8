"""ChunkTopK = ChunkChoice + Residual + ChunkAllReduce.

Sun et al., "Optimizing Network Performance for Distributed DNN Training on GPU Clusters: ImageNet/AlexNet Training
in 1.5 Minutes" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.exchange.base import Exchange
from thinwire.exchange.chunks import ChunkAllReduce
from thinwire.methods.base import Sparsifier
from thinwire.methods.schedule import Schedule
from thinwire.select.base import Selector
from thinwire.select.chunks import ChunkChoice
from thinwire.validate import check_positive_int


@dataclass(frozen=True, kw_only=True)
class ChunkTopK(Sparsifier):
    """The chunks of each tensor with the largest norms summed over ranks; no indices travel.

    Coarse: at equal density it keeps less energy than element-wise selection. The paper adds momentum correction:
    `memory=tw.memory.MomentumCorrection()`.
    """

    density: float | Schedule = 0.1
    """Fraction of the chunks kept."""
    exchange: Exchange = field(default_factory=ChunkAllReduce)
    """How norms and chunks travel."""
    chunk: int = 256
    """Elements per chunk at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_int("chunk", self.chunk)

    def selector(self) -> Selector:
        return ChunkChoice(self.kept, self.chunk)
