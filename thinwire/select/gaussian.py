"""GaussianK's threshold: gradients are taken to be normal.

Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from thinwire.select.finish import ThresholdSelector

# Thresholds tried; the last one is used as it is.
TURNS = 4


@dataclass(frozen=True)
class GaussianThreshold(ThresholdSelector):
    """1. threshold = mean + z std, z the two-sided normal quantile of the density.
    2. Up to four turns: fewer than 2k/3 survivors halve it, more than 4k/3 raise it by half.

    The published form adds the signed mean to a threshold on magnitudes, which is harmless only near mean 0.
    """

    def estimate(self, x: Tensor, magnitude: Tensor, target: int) -> Tensor:
        if x.numel() < 2:
            return magnitude.new_zeros(())
        mean = x.mean() if self.finish == "published" else x.mean().abs()
        z = NormalDist().inv_cdf(1 - target / x.numel() / 2)
        threshold = mean + z * x.std()
        for _ in range(TURNS - 1):
            count = (magnitude > threshold).sum()
            too_few, too_many = 3 * count < 2 * target, 3 * count > 4 * target
            if magnitude.device.type == "cpu" and not bool(too_few | too_many):
                break
            factor = torch.where(too_few, 0.5, torch.where(too_many, 1.5, 1.0))
            threshold = threshold * factor.to(threshold.dtype)
        return threshold
