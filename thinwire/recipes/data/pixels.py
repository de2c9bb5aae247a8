"""Pixels: images that fit into memory, kept as bytes where the model is and cropped and flipped there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from thinwire.recipes.examples import Batch, Examples, send, split

BRIGHTEST = 255.0
TESTED_BYTES = 1 << 22
"""Of images, which a test takes at once whatever the batch size: with small ones a GPU waits for the next call all the time."""


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """Bytes to floats of about zero mean and unit variance, channel by channel."""

    scale: Tensor
    shift: Tensor

    @classmethod
    def of(cls, mean: Sequence[float], std: Sequence[float]) -> Normalisation:
        """From the mean and the standard deviation of each channel, of pixels in [0, 1]."""
        means, stds = (torch.tensor(values)[:, None, None] for values in (mean, std))
        return cls(scale=1 / (BRIGHTEST * stds), shift=-means / stds)

    def apply(self, images: Tensor) -> Tensor:
        return torch.addcmul(self.shift, images.float(), self.scale)

    def to(self, device: torch.device) -> Normalisation:
        return Normalisation(scale=self.scale.to(device), shift=self.shift.to(device))


@dataclass(frozen=True, kw_only=True)
class Pixels(Examples):
    """Images [N, C, H, W] of bytes and their labels [N] int64."""

    images: Tensor
    labels: Tensor
    normalisation: Normalisation
    padding: int = 0
    """In training: a random crop of the image's own size out of the image with so much black around it."""
    flip: bool = False
    """In training: mirrored left to right, every other time."""

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, index: Tensor, generator: torch.Generator | None) -> Batch:
        return self._fetch(self.draw(index, generator))

    def batches(
        self, indices: Sequence[Tensor], generators: Sequence[torch.Generator]
    ) -> list[Batch]:
        drawn = [self.draw(*one) for one in zip(indices, generators, strict=True)]
        return split(self._fetch(torch.cat(drawn)), [len(index) for index in indices])

    def draw(self, index: Tensor, generator: torch.Generator | None) -> Tensor:
        """[images, 4]: which image, the upper left corner of its crop, and whether it is mirrored; [images, 1] without a draw."""
        count = len(index)
        if generator is None or not (self.padding or self.flip):
            return index[:, None]
        corners = torch.randint(2 * self.padding + 1, (count, 2), generator=generator)
        flips = torch.randint(2 if self.flip else 1, (count, 1), generator=generator)
        return torch.cat([index[:, None], corners, flips], dim=1)

    def _fetch(self, chosen: Tensor) -> Batch:
        """What `draw` has chosen."""
        chosen = send(chosen, self.images.device)
        places, draws = chosen[:, 0], chosen[:, 1:]
        images = self.images[places]
        if draws.numel():
            images = self.augment(images, draws)
        return self.normalisation.apply(images), self.labels[places]

    def augment(self, images: Tensor, draws: Tensor) -> Tensor:
        """Crop and flip each image by its own draw: one gather for all of them."""
        count, channels, height, width = images.shape
        rows = draws[:, 0:1] + torch.arange(height, device=images.device)
        forth = torch.arange(width, device=images.device)
        columns = draws[:, 1:2] + torch.where(draws[:, 2:3] == 1, forth.flip(0), forth)
        padded = functional.pad(images, (self.padding,) * 4)
        places = rows[:, :, None] * padded.shape[3] + columns[:, None, :]
        picked = padded.flatten(2).gather(2, places.view(count, 1, -1).expand(-1, channels, -1))
        return picked.view(images.shape)

    def deal_test(self, *, rank: int, world: int, batch_size: int) -> list[Tensor]:
        """Batches of one size, up to a few examples: kernels are chosen anew for every size."""
        mine = torch.arange(rank, len(self), world)
        at_once = max(batch_size, TESTED_BYTES // self.images[0].numel())
        return list(mine.tensor_split(-(-len(mine) // at_once))) if len(mine) else []

    def to(self, device: torch.device) -> Pixels:
        return replace(
            self,
            images=self.images.to(device),
            labels=self.labels.to(device),
            normalisation=self.normalisation.to(device),
        )
