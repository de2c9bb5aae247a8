"""DGC = SampledThreshold + MomentumCorrection + AllGatherFast.

Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training" (ICLR 2018).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from thinwire.compressor import Compressor, GroupStep, Opened, SparseCompressor
from thinwire.memory.base import Memory
from thinwire.memory.clip import Clip
from thinwire.memory.momentum import MomentumCorrection
from thinwire.methods.base import Dense, DenseMomentum, Method, Sparsifier
from thinwire.plan.schedule import Schedule
from thinwire.select.base import Selector
from thinwire.select.sampled import SampledThreshold
from thinwire.validate import check_instance


@dataclass(frozen=True, kw_only=True)
class DGC(Sparsifier):
    """Deep gradient compression: sampled top-k of a velocity that carries momentum on every worker.

    Needs `attach(..., optimizer=opt)`: momentum and weight decay are taken over from `torch.optim.SGD` (or from
    `tw.optim.DGCSGD`). Weight decay bypasses compression; dense slots get their momentum after averaging.
    The paper's warm-up is `density=tw.warmup([0.25, 0.0625, 0.015625, 0.004], final=0.001, every=steps_per_epoch)`.
    """

    density: float | Schedule = 0.001
    """Fraction of the entries kept, at most."""
    memory: Memory = field(default_factory=MomentumCorrection)
    """Momentum correction with masking, as published."""
    clip: Clip | None = None
    """Local clipping before accumulation, such as tw.Clip(norm=5.0, by_workers=True)."""
    sample_ratio: float = 0.01
    """Fraction of the elements sampled for the threshold."""
    sample: str = "strided"
    """"strided" or "random" (with replacement)."""
    upper: float = 1.3
    """More than this times k survivors are too many,"""
    lower: float = 0.8
    """fewer than this times k too few."""
    iterations: int = 10
    """Corrections of the threshold at most."""
    reselect: bool = True
    """Cut too many survivors exactly at once instead of raising the threshold."""
    finish: str = "promise"
    """"published" may send less than `lower` times k, even nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is not None:
            check_instance("clip", self.clip, Clip, "such as tw.Clip(norm=5.0)")
        self.selector()

    def selector(self) -> Selector:
        return SampledThreshold(
            self.kept,
            self.finish,
            self.sample_ratio,
            self.sample,
            self.upper,
            self.lower,
            self.iterations,
            self.reselect,
        )

    def dense_companion(self, dense: Dense) -> Method:
        companion = super().dense_companion(dense)
        return (
            replace(companion, clip=self.clip)
            if isinstance(companion, DenseMomentum)
            else companion
        )

    def compressor(self) -> Compressor:
        self._check_fit()
        wire = self.wire_format()
        compressor = ClippingCompressor(
            self.selector(), self.memory, wire.value_code, wire.index_code, self.exchange
        )
        compressor.clip = self.clip
        return compressor


class ClippingCompressor(SparseCompressor):
    """Clips the local gradient before memory sees it."""

    clip: Clip | None = None

    def open(self, step: GroupStep) -> Opened:
        return super().open(self.clip.apply(step) if self.clip is not None else step)
