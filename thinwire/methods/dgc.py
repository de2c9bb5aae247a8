"""DGC = TradTopK or SampledThreshold + MomentumCorrection + AllGather.

Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training" (ICLR 2018).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from thinwire.errors import UsageError
from thinwire.memory.base import Memory
from thinwire.memory.clip import Clip
from thinwire.memory.momentum import MomentumCorrection
from thinwire.methods.base import Dense, DenseMomentum, Method, Sparsifier
from thinwire.methods.schedule import Schedule
from thinwire.select.base import Selector
from thinwire.select.sampled import SampledThreshold
from thinwire.select.topk import TradTopK
from thinwire.validate import check_instance

SAMPLING = ("sample", "upper", "lower", "iterations", "reselect", "finish")
"""The settings that only sampling reads."""


@dataclass(frozen=True, kw_only=True)
class DGC(Sparsifier):
    """Deep gradient compression: the top-k of a velocity that carries momentum on every worker.

    Selection is exact by default, which is what the published sampling approximates and what the CUDA kernels do in the pass
    that adds the momentum; `sample_ratio=0.01` is the published way, with the settings below it. A `clip` is applied by
    operations of its own before them.
    Needs `attach(..., optimizer=opt)`: momentum and weight decay are taken over from `torch.optim.SGD` (or from
    `tw.optim.DGCSGD`). Weight decay bypasses compression; dense slots get their momentum after averaging.
    The paper's warm-up is `density=tw.warmup([0.25, 0.0625, 0.015625, 0.004], final=0.001, every=steps_per_epoch)`.
    """

    density: float | Schedule = 0.001
    """Fraction of the entries kept, at most."""
    memory: Memory = field(default_factory=MomentumCorrection)
    """Momentum correction with masking, as published."""
    clip: Clip | None = None
    """Local clipping before accumulation, such as tw.memory.Clip(norm=5.0, by_workers=True)."""
    sample_ratio: float | None = None
    """Fraction of the elements sampled for a threshold; None = exact top-k. The settings below apply to the sampling."""
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
            check_instance("clip", self.clip, Clip, "such as tw.memory.Clip(norm=5.0)")
        if self.sample_ratio is None:
            self._check_no_sampling()
        self.selector()

    def _check_no_sampling(self) -> None:
        """A setting of the sampling that would have no effect is a mistake."""
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name in SAMPLING and value != setting.default:
                raise UsageError(
                    f"{setting.name} is {value!r}, which goes only with sampling; set sample_ratio, such as 0.01"
                )

    def selector(self) -> Selector:
        if self.sample_ratio is None:
            return TradTopK(self.kept)
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
        if isinstance(companion, DenseMomentum):
            return replace(companion, clip=self.clip)
        return companion

    @property
    def local_clip(self) -> Clip | None:
        return self.clip
