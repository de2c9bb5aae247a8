"""RedSync's thresholds: a search between the mean and the maximum magnitude.

Fang et al., "RedSync: Reducing Synchronization Bandwidth for Distributed Deep Learning Training System" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.looks import Look
from thinwire.select.base import ABOVE_ESTIMATES
from thinwire.select.finish import ThresholdSelector
from thinwire.validate import check_bool

# The published search stops when its interval is this short: three probes.
PUBLISHED_WIDTH = 0.2
# Of a search that divides its interval by eight.
ROUNDS = 4


@dataclass(frozen=True)
class RedSyncThreshold(ThresholdSelector):
    """Threshold binary search, or trimmed top-k.

    Binary search: probe between mean and maximum, geometrically, until k to 1.25 k survive. `finish="published"`
    probes arithmetically and at most three times, aims at k to 2 k, and moves the wrong way between k/2 and k.

    Trimmed: lower a share q of the way from mean to maximum, 0.8, 0.6, ... 0, until k survive; then keep exactly
    the k largest of them (`finish="published"` sends all survivors, as the circulating code does).
    """

    form = ABOVE_ESTIMATES

    trimmed: bool = False
    """Trimmed top-k instead of the binary search."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bool("trimmed", self.trimmed)

    def capacity(self, target: int) -> int:
        if self.trimmed and self.finish == "promise":
            return target
        return super().capacity(target)

    def estimate(self, look: Look) -> Tensor:
        everything = look.tail()
        mean, largest = everything.total / look.targets.lengths, everything.largest
        if self.trimmed:
            return self._trim(look, mean, largest)
        if self.finish == "published":
            return self._search_as_published(look, mean, largest)
        return self._search(look, mean, largest)

    def _trim(self, look: Look, mean: Tensor, largest: Tensor) -> Tensor:
        shares = look.targets.listed("shares", (0.8, 0.6, 0.4, 0.2, 0.0))
        probes = mean[:, None] + shares * (largest - mean)[:, None]
        too_few = look.count(probes[:, :-1]) < look.targets.wanted[:, None]
        return probes.gather(1, too_few.sum(1, keepdim=True))[:, 0]

    def _search(self, look: Look, mean: Tensor, largest: Tensor) -> Tensor:
        """Cut the interval of logarithms into eight and go on with the part in which fewer than k survive above and k below.

        Of logarithms: heavy tails put the threshold at a thousandth of the maximum. Eight parts at a time: one look answers for
        seven thresholds, so that three halvings of the paper's search are one pass.
        """
        wanted = look.targets.wanted[:, None]
        most = look.targets.numbers("most", lambda _, k: self.capacity(k))[:, None]
        parts = look.targets.listed("parts", [part / 8 for part in range(9)])
        low, high = mean.log()[:, None], largest.log()[:, None]
        for _ in range(ROUNDS):
            edges = low + parts * (high - low)
            count = look.count(edges[:, 1:-1].exp())
            enough = count >= wanted
            above = enough.sum(1, keepdim=True)
            low, high = edges.gather(1, above), edges.gather(1, above + 1)
            settled = (enough & (count <= most)).any(1, keepdim=True)
            if look.readable and bool(settled.all()):
                break
            high = torch.where(settled, low, high)
        return low[:, 0].exp()

    def _search_as_published(self, look: Look, mean: Tensor, largest: Tensor) -> Tensor:
        target = look.targets.wanted
        low, high = torch.zeros_like(mean), torch.ones_like(mean)
        threshold, done = mean, torch.zeros_like(mean, dtype=torch.bool)
        width = 1.0
        while width > PUBLISHED_WIDTH:
            q = (low + high) / 2
            threshold = torch.where(done, threshold, mean + q * (largest - mean))
            count = look.count(threshold)
            done = done | ((target < count) & (count < 2 * target))
            lower = 2 * count < target
            high = torch.where(done | ~lower, high, q)
            low = torch.where(done | lower, low, q)
            width /= 2
        return threshold
