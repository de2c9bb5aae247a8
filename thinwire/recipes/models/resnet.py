"""Bottleneck ResNets: torchvision's for ImageNet where it is installed, the same network from here where it is not.

Parameters have torchvision's names and shapes, so that its checkpoints fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from thinwire.recipes.kinds import Kind
from thinwire.recipes.models.fitting import expect_kind
from thinwire.recipes.models.vision import build_with_torchvision
from thinwire.recipes.objectives.images import Images

EXPANSION = 4
SMALL_IMAGE = 64
"""Images with fewer pixels a side are not shrunk before the first block: CIFAR's variant."""


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1 convolutions beside a shortcut; the stride is in the middle one."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * EXPANSION
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        return functional.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet(nn.Module):
    """A first convolution, stages of bottlenecks, a linear layer."""

    def __init__(self, images: Images, blocks: Sequence[int], width: int) -> None:
        super().__init__()
        if is_small(images):
            self.conv1 = nn.Conv2d(images.channels, width, 3, padding=1, bias=False)
            self.pool: nn.Module = nn.Identity()
        else:
            self.conv1 = nn.Conv2d(images.channels, width, 7, 2, padding=3, bias=False)
            self.pool = nn.MaxPool2d(3, 2, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        inputs = width
        for stage, count in enumerate(blocks):
            layer = nn.Sequential()
            for place in range(count):
                stride = 2 if place == 0 and stage > 0 else 1
                layer.append(Bottleneck(inputs, width << stage, stride))
                inputs = (width << stage) * EXPANSION
            self.add_module(f"layer{stage + 1}", layer)
        self.stages = len(blocks)
        self.fc = nn.Linear(inputs, images.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(functional.relu(self.bn1(self.conv1(images))))
        for stage in range(self.stages):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        return self.fc(x.mean((2, 3)))


def resnet50(kind: Kind, tiny: bool) -> nn.Module:
    """25,557,032 parameters on ImageNet; 23,705,252 in its variant for CIFAR-100."""
    return _build("resnet50", kind, (3, 4, 6, 3), tiny)


def resnet152(kind: Kind, tiny: bool) -> nn.Module:
    """60,192,808 parameters on ImageNet."""
    return _build("resnet152", kind, (3, 8, 36, 3), tiny)


def is_small(images: Images) -> bool:
    return min(images.height, images.width) < SMALL_IMAGE


def _build(name: str, kind: Kind, blocks: Sequence[int], tiny: bool) -> nn.Module:
    images = expect_kind(name, kind, Images)
    if tiny:
        return ResNet(images, (1, 1), width=8)
    if not is_small(images) and (model := build_with_torchvision(name, images)) is not None:
        return model
    return ResNet(images, blocks, width=64)
