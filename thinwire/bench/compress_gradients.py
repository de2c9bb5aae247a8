"""Random gradients for measuring compression, cheap enough to be new in every step."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_DRAWN = 1 << 26
WINDOW_SHIFTS = 1 << 20
"""How far windows into the noise lie apart at most, in elements."""


class Gradients:
    """Normal values whose scale is log-normal, for a tail as real gradients have one.

    They are drawn once, because drawing as many numbers as a model has takes longer than what is measured. A gradient is
    made of windows into them, which begin elsewhere each time.
    """

    def __init__(self, device: torch.device, largest: int) -> None:
        self._window = min(largest, MOST_DRAWN)
        generator = torch.Generator(device).manual_seed(0)
        count = self._window + WINDOW_SHIFTS
        self._noise = torch.randn(count, generator=generator, device=device)
        scale = torch.randn(count, generator=generator, device=device)
        self._noise.mul_(scale.mul_(0.5).exp_())

    def fill(self, flat: Tensor, *key: int) -> None:
        """Another gradient for every key, the same for the same."""
        for part, piece in enumerate(flat.split(self._window)):
            shift = hash((*key, part)) % WINDOW_SHIFTS
            piece.copy_(self._noise[shift : shift + piece.numel()])
