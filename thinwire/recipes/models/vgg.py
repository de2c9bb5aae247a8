"""VGG-16 with batch normalisation: with one linear layer for small images, with three for ImageNet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from thinwire.recipes.kinds import Kind
from thinwire.recipes.models.fitting import expect_kind
from thinwire.recipes.models.vision import build_with_torchvision
from thinwire.recipes.objectives.images import Images

DEPTH_16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of the convolutions; the image is halved after each group."""
DEPTH_2 = ((8,), (16,))
HIDDEN = 4096
GRID = 7
"""Places a side that three linear layers look at."""


class VGG(nn.Module):
    """Convolutions, then a classifier of what they leave, averaged to a grid. Parameters have torchvision's names."""

    def __init__(self, channels: int, groups: Sequence[Sequence[int]], head: nn.Module, grid: int):
        super().__init__()
        self.features = nn.Sequential()
        widths = [width for group in groups for width in group]
        pairs = iter(pairwise([channels, *widths]))
        for group in groups:
            for inputs, outputs in (next(pairs) for _ in group):
                convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
                nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
                self.features.extend([convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)])
            self.features.append(nn.MaxPool2d(2))
        self.avgpool = nn.AdaptiveAvgPool2d(grid)
        self.classifier = head

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))


def vgg16(kind: Kind, tiny: bool) -> nn.Module:
    """Ok-Topk's, with one linear layer: 14,728,266 parameters at 10 classes."""
    images = expect_kind("vgg16", kind, Images)
    groups = DEPTH_2 if tiny else DEPTH_16
    head = nn.Linear(groups[-1][-1], images.classes)
    return VGG(images.channels, groups, head, grid=1)


def vgg16bn(kind: Kind, tiny: bool) -> nn.Module:
    """torchvision's, with three linear layers: 138,365,992 parameters on ImageNet."""
    images = expect_kind("vgg16bn", kind, Images)
    if not tiny and (model := build_with_torchvision("vgg16_bn", images)) is not None:
        return model
    return make_vgg16bn(images, tiny)


def make_vgg16bn(images: Images, tiny: bool) -> nn.Module:
    groups, grid, hidden = (DEPTH_2, 2, 16) if tiny else (DEPTH_16, GRID, HIDDEN)
    head = nn.Sequential(
        nn.Linear(groups[-1][-1] * grid * grid, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(hidden, images.classes),
    )
    for layer in head:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
    return VGG(images.channels, groups, head, grid)
