"""ViT-large from transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.recipes.kinds import Kind
from thinwire.recipes.models.bert import LARGE, TINY
from thinwire.recipes.models.fitting import expect_kind, import_transformers
from thinwire.recipes.models.weights import find_weights
from thinwire.recipes.objectives.images import Images

PATCH = 16


class ViT(nn.Module):
    """`model(images)` gives logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits


def vit_large(kind: Kind, tiny: bool) -> nn.Module:
    """304,326,632 parameters on ImageNet: patches of 16 x 16 pixels, 24 layers of width 1024."""
    images = expect_kind("vit-large", kind, Images)
    if images.height != images.width or images.height % PATCH:
        raise UsageError(
            f"model is 'vit-large', which needs square images of a multiple of {PATCH} pixels; "
            f"they are {images.height} x {images.width}"
        )
    package: Any = import_transformers("vit-large")
    path = None if tiny else find_weights("vit-large", "vit-large-patch16-224-in21k")
    if path is not None:
        # The head of the pretrained model is for other classes.
        return ViT(
            package.ViTForImageClassification.from_pretrained(
                path, local_files_only=True, num_labels=images.classes, ignore_mismatched_sizes=True
            )
        )
    config = package.ViTConfig(
        **(TINY if tiny else LARGE),
        image_size=images.height,
        patch_size=PATCH,
        num_channels=images.channels,
        num_labels=images.classes,
    )
    return ViT(package.ViTForImageClassification(config))
