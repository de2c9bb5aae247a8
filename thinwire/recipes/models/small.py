"""Small networks for small images: a perceptron and two convolutional networks."""

from __future__ import annotations

from torch import nn

from thinwire.errors import UsageError
from thinwire.recipes.kinds import Kind
from thinwire.recipes.models.fitting import expect_kind
from thinwire.recipes.objectives.images import Images

KERNEL = 5


def mlp(kind: Kind, tiny: bool) -> nn.Module:
    """Two hidden layers."""
    images = expect_kind("mlp", kind, Images)
    width = 8 if tiny else 512
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(images.channels * images.height * images.width, width),
        nn.ReLU(),
        *([] if tiny else [nn.Linear(width, width), nn.ReLU()]),
        nn.Linear(width, images.classes),
    )


def small_cnn(kind: Kind, tiny: bool) -> nn.Module:
    """151,306 parameters on digits, most of them in one linear layer as in the networks of the papers."""
    images = expect_kind("small-cnn", kind, Images)
    first, second, hidden = (4, 8, 16) if tiny else (32, 64, 128)
    return nn.Sequential(
        nn.Conv2d(images.channels, first, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(first, second, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * (images.height // 2) * (images.width // 2), hidden),
        nn.ReLU(),
        nn.Linear(hidden, images.classes),
    )


def cnn(kind: Kind, tiny: bool) -> nn.Module:
    """That of the MNIST examples: two convolutions and two linear layers with dropout; 21,840 parameters on MNIST."""
    images = expect_kind("cnn", kind, Images)
    first, second, hidden = (4, 8, 16) if tiny else (10, 20, 50)
    height, width = (_after(_after(size)) for size in (images.height, images.width))
    if min(height, width) < 1:
        raise UsageError(
            f"model is 'cnn', which needs images of at least 16 x 16; they are {images.height} x {images.width}"
        )
    return nn.Sequential(
        nn.Conv2d(images.channels, first, KERNEL),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(first, second, KERNEL),
        nn.Dropout2d(),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(second * height * width, hidden),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(hidden, images.classes),
    )


def _after(size: int) -> int:
    """Pixels that a convolution and a pooling leave of a side."""
    return (size - KERNEL + 1) // 2
