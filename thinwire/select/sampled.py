"""DGC's threshold: the top of a small sample of the tensor.

Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training" (ICLR 2018).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.kernels.looks import TorchLook
from thinwire.layout import RowTable, Slot, SlotRows, keep_count
from thinwire.select.finish import (
    EstimateSession,
    TargetRows,
    ThresholdSelector,
    target_rows,
)
from thinwire.select.random import generator_for
from thinwire.validate import check_bool, check_choice, check_density, check_finite_number

SAMPLES = ("strided", "random")


@dataclass(frozen=True)
class SampledThreshold(ThresholdSelector):
    """1. Sample the magnitudes, every stride-th from a drawn start, or at random with replacement; at least so many
       that two hits are expected. A tensor too small for that is searched exactly.
    2. threshold = the smallest of the sample's top `density`.
    3. At most `iterations` times: more than `upper` k survivors raise the threshold by `upper`, or end the search if
       `reselect` (the exact cut to k follows anyway); fewer than `lower` k lower it by `lower`.
    4. Of the survivors the k largest are sent, and never fewer than one.

    k = max(1, floor(n x density)). `finish="published"` sends what step 3 gives, cut to k; it may be nothing.
    """

    sample_ratio: float = 0.01
    """Fraction of the elements that are sampled."""
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
    seed: int = 0
    """Of the samples; the same on all ranks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density("sample_ratio", self.sample_ratio)
        check_choice("sample", self.sample, SAMPLES)
        check_bool("reselect", self.reselect)
        check_finite_number("upper", self.upper)
        check_finite_number("lower", self.lower)
        if not 0.0 < self.lower <= 1.0 <= self.upper:
            raise UsageError(
                f"lower is {self.lower!r} and upper is {self.upper!r}; they must lie on the two sides of 1, lower above 0"
            )
        if not isinstance(self.iterations, int) or self.iterations < 0:
            raise UsageError(
                f"iterations is {self.iterations!r}; it must be a whole number of at least 0"
            )

    def rows(self, slot: Slot, mode: Hashable = None) -> SlotRows:
        target = keep_count(slot.numel, self.density)
        fewest = 0 if self.finish == "published" else max(1, math.ceil(self.lower * target))
        return TargetRows(
            slot, (), (), slot.numel, 1, target, "whole tensor", target, fewest, target
        )

    def session(self) -> EstimateSession:
        return SampledSession(self)

    def stride(self, length: int, density: float) -> int:
        """Distance of the samples; 1 = the whole tensor. Odd, so that it does not follow the layout's powers of two."""
        two_hits = math.ceil(2 / density)
        if self.sample_ratio == 1.0 or length <= two_hits:
            return 1
        need = max(math.ceil(length * self.sample_ratio), two_hits)
        stride = 32 * math.ceil(length / need / 32) + 1
        while stride > 1 and length // stride < need:
            stride -= 8
        return max(1, stride)


class SampledSession(EstimateSession):
    selector: SampledThreshold

    def __init__(self, selector: SampledThreshold) -> None:
        super().__init__(selector)
        self._counts: dict[str, int] = {}

    def begin(self, names: Sequence[str], counts: Sequence[int]) -> Hashable:
        # Every exchange has a sample of its own, but always the same shapes: one mode.
        self._counts.update(zip(names, counts, strict=True))
        return None

    def thresholds(self, look: TorchLook, table: RowTable) -> Tensor:
        pairs = zip(look.magnitudes, map(target_rows, table.rows), strict=True)
        return torch.stack([self.threshold(*pair) for pair in pairs])

    def threshold(self, magnitude: Tensor, rows: TargetRows) -> Tensor:
        density = rows.target / rows.length
        stride = self.selector.stride(rows.length, density)
        sample = self._sample(magnitude, stride, rows.slot.name)
        hits = max(1, min(sample.numel(), math.ceil(sample.numel() * density)))
        threshold = sample.topk(hits, sorted=False).values.min()
        return self.adapt(magnitude, threshold, rows.target) if stride > 1 else threshold

    def _sample(self, magnitude: Tensor, stride: int, name: str) -> Tensor:
        if stride == 1:
            return magnitude
        count, seed = self._counts.get(name, 0), self.selector.seed
        if self.selector.sample == "strided":
            start = generator_for(name, count, seed, torch.device("cpu")).initial_seed() % stride
            return magnitude[start::stride]
        generator = generator_for(name, count, seed, magnitude.device)
        size = (magnitude.numel() // stride,)
        places = torch.randint(
            magnitude.numel(), size, generator=generator, device=magnitude.device
        )
        return magnitude[places]

    def adapt(self, magnitude: Tensor, threshold: Tensor, target: int) -> Tensor:
        """A threshold that about `target` magnitudes reach, from one that was found in a sample."""
        setting = self.selector
        if setting.reselect and magnitude.device.type != "cpu":
            fewest = math.ceil(setting.lower * target)
            return lower_to_reach(magnitude, threshold, setting.lower, fewest, setting.iterations)
        for _ in range(setting.iterations):
            count = (magnitude >= threshold).sum()
            too_few = count < setting.lower * target
            too_many = (count > setting.upper * target) & (not setting.reselect)
            if magnitude.device.type == "cpu" and not bool(too_few | too_many):
                break
            factor = torch.where(too_few, setting.lower, torch.where(too_many, setting.upper, 1.0))
            threshold = threshold * factor.to(threshold.dtype)
        return threshold


def lower_to_reach(
    magnitude: Tensor, threshold: Tensor, factor: float, fewest: int, iterations: int
) -> Tensor:
    """The first of threshold, threshold x factor, ... that `fewest` magnitudes reach, the last if none is.

    So many reach a threshold exactly if the `fewest`-th largest does: one selection in place of a count per threshold, and
    nothing is read back. Rounded as the search by counts rounds: a factor in float32, one product after the other.
    """
    step = float(torch.tensor(factor, dtype=torch.float32))
    tried = [threshold]
    for _ in range(iterations):
        tried.append(tried[-1] * step)
    falling = torch.stack(tried)
    reached = falling <= magnitude.topk(fewest, sorted=False).values.min()
    return torch.where(reached, falling, falling[-1]).max()
