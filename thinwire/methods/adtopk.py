"""ADTopK = AllDimensionTopK (interleaved with TradTopK or ThresholdTopK) + Residual + AllGatherFast.

Ming et al., "ADTopk: All-Dimension Top-k Compression for High-Performance Data-Parallel DNN Training" (HPDC'24).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.errors import UsageError
from thinwire.methods.base import Sparsifier
from thinwire.select.base import Selector
from thinwire.select.interleave import Interleaved
from thinwire.select.rows import Axis
from thinwire.select.threshold import Monitor, ThresholdTopK, Updater
from thinwire.select.topk import AllDimensionTopK, TradTopK
from thinwire.validate import (
    check_axis,
    check_bool,
    check_instance,
    check_interleave,
    check_positive_int,
)


@dataclass(frozen=True, kw_only=True)
class ADTopK(Sparsifier):
    """Top-k inside every row or fibre, so that every dimension contributes; optionally in turns with global top-k."""

    axis: Axis = "auto"
    """"auto" chooses by the kind of layer, "published" takes axis 1 always, a number is taken as it is."""
    interleave: int | None = None
    """2 = every second step selects globally, 3 = every third; None = never."""
    threshold: bool = False
    """Whether the global turns reuse a threshold instead of selecting exactly every time."""
    monitor: Monitor = field(default_factory=Monitor)
    """When a threshold counts as stable, and how long the exact warm-up is."""
    updater: Updater = field(default_factory=Updater)
    """How often the threshold is refreshed, in global turns."""
    total_steps: int | None = None
    """Training length; if known, tensors with a stable threshold are all-dimension only in the last quarter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_axis("axis", self.axis)
        check_bool("threshold", self.threshold)
        check_instance("monitor", self.monitor, Monitor, "a tw.Monitor(...)")
        check_instance("updater", self.updater, Updater, "a tw.Updater(...)")
        if self.interleave is not None:
            check_interleave("interleave", self.interleave)
        elif self.threshold:
            raise UsageError(
                "threshold is True but interleave is None; there are no global turns without interleave=2 or more"
            )
        if self.total_steps is not None:
            check_positive_int("total_steps", self.total_steps)

    def selector(self) -> Selector:
        dimensions = AllDimensionTopK(self.kept, self.axis)
        if self.interleave is None:
            return dimensions
        globally = (
            ThresholdTopK(self.kept, self.monitor, self.updater)
            if self.threshold
            else TradTopK(self.kept)
        )
        return Interleaved(dimensions, globally, self.interleave, self.total_steps)
