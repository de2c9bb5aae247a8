"""GaussianK's threshold: gradients are taken to be normal.

Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from thinwire.kernels.looks import Look
from thinwire.select.base import ABOVE_ESTIMATES
from thinwire.select.finish import ThresholdSelector

# Thresholds tried; the last one is used as it is.
TURNS = 4


@dataclass(frozen=True)
class GaussianThreshold(ThresholdSelector):
    """1. threshold = mean + z std, z the two-sided normal quantile of the density.
    2. Up to four turns: fewer than 2k/3 survivors halve it, more than 4k/3 raise it by half.

    The published form adds the signed mean to a threshold on magnitudes, which is harmless only near mean 0.
    """

    form = ABOVE_ESTIMATES

    def estimate(self, look: Look) -> Tensor:
        everything, targets, n = look.tail(), look.targets, look.targets.lengths
        mean = everything.signed / n
        others = targets.numbers("n - 1", lambda length, _: float(max(1, length - 1)))
        variance = (everything.squares - mean * everything.signed) / others
        z = targets.numbers("z", lambda length, k: NormalDist().inv_cdf(1 - k / length / 2))
        few = targets.numbers("few", lambda _, k: -(-2 * k // 3))
        many = targets.numbers("many", lambda _, k: 4 * k // 3)
        center = mean if self.finish == "published" else mean.abs()
        threshold = center + z * variance.clamp(min=0.0).sqrt()
        for _ in range(TURNS - 1):
            count = look.count(threshold)
            too_few, too_many = count < few, count > many
            if look.readable and not bool((too_few | too_many).any()):
                break
            # 0.5, 1 or 1.5 times as high.
            turn = torch.add(too_many.double(), too_few, alpha=-1)
            threshold = torch.addcmul(threshold, turn, threshold, value=0.5)
        return threshold
