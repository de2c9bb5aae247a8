"""RedSync's thresholds: a search between the mean and the maximum magnitude.

Fang et al., "RedSync: Reducing Synchronization Bandwidth for Distributed Deep Learning Training System" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.select.finish import ThresholdSelector
from thinwire.validate import check_bool

# The published search stops when its interval is this short: three probes.
PUBLISHED_WIDTH = 0.2
PROBES = 12


@dataclass(frozen=True)
class RedSyncThreshold(ThresholdSelector):
    """Threshold binary search, or trimmed top-k.

    Binary search: probe between mean and maximum, geometrically, until k to 1.25 k survive. `finish="published"`
    probes arithmetically and at most three times, aims at k to 2 k, and moves the wrong way between k/2 and k.

    Trimmed: lower a share q of the way from mean to maximum, 0.8, 0.6, ... 0, until k survive; then keep exactly
    the k largest of them (`finish="published"` sends all survivors, as the circulating code does).
    """

    trimmed: bool = False
    """Trimmed top-k instead of the binary search."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bool("trimmed", self.trimmed)

    def capacity(self, target: int) -> int:
        if self.trimmed and self.finish == "promise":
            return target
        return super().capacity(target)

    def estimate(self, x: Tensor, magnitude: Tensor, target: int) -> Tensor:
        mean, largest = magnitude.mean(), magnitude.max()
        if self.trimmed:
            return self._trim(magnitude, mean, largest, target)
        if self.finish == "published":
            return self._search_as_published(magnitude, mean, largest, target)
        return self._search(magnitude, mean, largest, target)

    def _trim(self, magnitude: Tensor, mean: Tensor, largest: Tensor, target: int) -> Tensor:
        threshold = mean
        found = torch.zeros((), dtype=torch.bool, device=magnitude.device)
        for tenths in (8, 6, 4, 2):
            probe = mean + (tenths / 10) * (largest - mean)
            enough = (magnitude > probe).sum() >= target
            threshold = torch.where(enough & ~found, probe, threshold)
            found = found | enough
            if magnitude.device.type == "cpu" and bool(found):
                break
        return threshold

    def _search(self, magnitude: Tensor, mean: Tensor, largest: Tensor, target: int) -> Tensor:
        """Bisect the logarithm: heavy tails put the threshold at a thousandth of the maximum."""
        low, high = mean.log(), largest.log()
        threshold = (0.5 * (low + high)).exp()
        for _ in range(PROBES):
            count = (magnitude >= threshold).sum()
            too_few, too_many = count < target, count > self.capacity(target)
            if magnitude.device.type == "cpu" and not bool(too_few | too_many):
                break
            middle = 0.5 * (low + high)
            high = torch.where(too_few, middle, high)
            low = torch.where(too_many, middle, low)
            settled = ~(too_few | too_many)
            threshold = torch.where(settled, threshold, (0.5 * (low + high)).exp())
        return threshold

    def _search_as_published(
        self, magnitude: Tensor, mean: Tensor, largest: Tensor, target: int
    ) -> Tensor:
        low = torch.zeros((), device=magnitude.device)
        high = torch.ones((), device=magnitude.device)
        threshold = mean
        done = torch.zeros((), dtype=torch.bool, device=magnitude.device)
        width = 1.0
        while width > PUBLISHED_WIDTH:
            q = (low + high) / 2
            threshold = torch.where(done, threshold, mean + q * (largest - mean))
            count = (magnitude > threshold).sum()
            done = done | ((target < count) & (count < 2 * target))
            lower = 2 * count < target
            high = torch.where(done | ~lower, high, q)
            low = torch.where(done | lower, low, q)
            width /= 2
        return threshold
