"""torchvision's models, where it is installed."""

from __future__ import annotations

import importlib

from torch import nn

from thinwire.recipes.objectives.images import Images

COLOURS = 3


def build_with_torchvision(name: str, images: Images) -> nn.Module | None:
    """torchvision's model of that name with random weights; None without torchvision, or if the images have no colours."""
    if images.channels != COLOURS:
        return None
    try:
        models = importlib.import_module("torchvision.models")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        return None
    return getattr(models, name)(weights=None, num_classes=images.classes)
