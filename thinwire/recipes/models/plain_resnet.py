"""ResNets for small images, as He et al. (2016) have them for CIFAR: two convolutions per block, shortcuts without parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from thinwire.recipes.kinds import Kind
from thinwire.recipes.models.fitting import expect_kind
from thinwire.recipes.objectives.images import Images


class Block(nn.Module):
    """x + f(x); where f halves the image, x is sampled at every second pixel and its new channels are zero."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.new_channels = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.stride > 1:
            before = self.new_channels // 2
            x = x[:, :, :: self.stride, :: self.stride]
            x = functional.pad(x, (0, 0, 0, 0, before, self.new_channels - before))
        return functional.relu(x + y)


class PlainResNet(nn.Module):
    """Stages of blocks; each after the first halves the image and doubles the channels."""

    def __init__(self, channels: int, classes: int, blocks: Sequence[int], width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.stages = nn.Sequential()
        for stage, count in enumerate(blocks):
            for place in range(count):
                first = place == 0 and stage > 0
                outputs = width << stage
                self.stages.append(
                    Block(outputs // 2 if first else outputs, outputs, 2 if first else 1)
                )
        self.fc = nn.Linear(outputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(images)))
        return self.fc(self.stages(x).mean((2, 3)))


def resnet20(kind: Kind, tiny: bool) -> nn.Module:
    """269,722 parameters at 10 classes."""
    return _build("resnet20", kind, 3, tiny)


def resnet110(kind: Kind, tiny: bool) -> nn.Module:
    """1,727,962 parameters at 10 classes."""
    return _build("resnet110", kind, 18, tiny)


def _build(name: str, kind: Kind, blocks: int, tiny: bool) -> nn.Module:
    images = expect_kind(name, kind, Images)
    stages, width = ((1, 1), 8) if tiny else ((blocks,) * 3, 16)
    return PlainResNet(images.channels, images.classes, stages, width)
