"""Images of one class each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.recipes.examples import Batch
from thinwire.recipes.kinds import Carry, Kind, Totals

SECOND_CHANCES = 5


@dataclass(frozen=True, kw_only=True)
class Images(Kind):
    """A batch is (images [B, C, H, W] float and normalised, labels [B] int64); `model(images)` gives logits [B, classes]."""

    headline: ClassVar[str] = "top1"
    higher_is_better: ClassVar[bool] = True

    channels: int
    height: int
    width: int
    classes: int

    def loss(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        images, labels = batch
        return functional.cross_entropy(model(images).float(), labels), None

    def measure(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Totals, Carry]:
        """Images whose class is the likeliest, and those whose class is among the likeliest five."""
        images, labels = batch
        likeliest = model(images).topk(min(SECOND_CHANCES, self.classes), dim=1).indices
        right = likeliest == labels[:, None]
        count = torch.tensor(len(labels), device=labels.device)
        return {"top1": (right[:, 0].sum(), count), "top5": (right.sum(), count)}, None
