"""ADTopK = AllDimensionTopK (interleaved with TradTopK or ThresholdTopK) + Residual + AllGather.

Ming et al., "ADTopk: All-Dimension Top-k Compression for High-Performance Data-Parallel DNN Training" (HPDC'24).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from thinwire.errors import UsageError
from thinwire.layout import Axis
from thinwire.methods.base import Adaptive, Dense, Method, Sparsifier
from thinwire.select.base import Selector
from thinwire.select.interleave import Interleaved
from thinwire.select.threshold_reused import Monitor, ThresholdTopK, Updater
from thinwire.select.topk import AllDimensionTopK, TradTopK
from thinwire.validate import (
    check_axis,
    check_bool,
    check_choice,
    check_instance,
    check_interleave,
    check_positive_int,
)


@dataclass(frozen=True, kw_only=True)
class ADTopK(Sparsifier):
    """Top-k inside every row or fibre, so that every dimension contributes; optionally in turns with global top-k."""

    axis: Axis = "auto"
    """"auto" chooses by the kind of layer, "published" takes axis 1 always, a number names the axis."""
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
    partial: bool | str = False
    """Partial sparsification: True measures real steps and sends dense whatever the link has time for; "published" sends
    dense the small tensors that together fit into the sparse budget, whatever the link."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_axis("axis", self.axis)
        check_bool("threshold", self.threshold)
        check_choice("partial", self.partial, (False, True, "published"))
        check_instance("monitor", self.monitor, Monitor, "a tw.select.Monitor(...)")
        check_instance("updater", self.updater, Updater, "a tw.select.Updater(...)")
        if self.interleave is not None:
            check_interleave("interleave", self.interleave)
        elif self.threshold:
            raise UsageError(
                "threshold is True but interleave is None; there are no global turns without interleave=2 or more"
            )
        if self.total_steps is not None:
            check_positive_int("total_steps", self.total_steps)

    @property
    def adaptive(self) -> Adaptive | None:
        if self.partial is not True:
            return None
        return Adaptive(among=(replace(self, partial=False),), finalists=1)

    def at(self, step: int) -> Method:
        """Dense until it is measured, where it measures."""
        return self.dense_companion(Dense()) if self.partial is True else super().at(step)

    def exempt(self, sizes: Mapping[str, int]) -> frozenset[str]:
        if self.partial != "published":
            return frozenset()
        limit = size_threshold(sizes.values(), self.kept)
        return frozenset(name for name, numel in sizes.items() if numel <= limit)

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


def size_threshold(sizes: Iterable[int], density: float) -> int:
    """The largest size up to which all tensors fit, dense, into the sparse budget, as published; 0 = none.

    1. The budget is density x all elements, at least 1.
    2. From the smallest size up, take each from the budget.
    3. The first that does not fit is one element above the threshold.
    """
    ascending = sorted(sizes)
    budget = max(1.0, density * sum(ascending))
    for size in ascending:
        if size >= budget:
            return size - 1
        budget -= size
    return ascending[-1] if ascending else 0
