"""digits: 1797 real handwritten digits of 8 x 8 pixels and a small convolutional network.

The data comes with scikit-learn, so this task needs no download.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from thinwire.recipes.config import Training
from thinwire.recipes.tasks import Data, Examples, Task

TEST_EXAMPLES = 360
BRIGHTEST_PIXEL = 16.0


def load() -> Data:
    """The digits in [-1, 1], split once and for all: the split does not follow the run's seed."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    inputs = torch.from_numpy(digits.images).float().unsqueeze(1) / (BRIGHTEST_PIXEL / 2) - 1
    targets = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_EXAMPLES], order[TEST_EXAMPLES:]
    return Data(
        Examples(inputs[train], targets[train]),
        Examples(inputs[test], targets[test]),
    )


def build() -> nn.Module:
    """151 thousand parameters, most of them in one linear layer as in the networks of the papers."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def score(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 for each digit that is recognised."""
    return (outputs.argmax(1) == targets).float()


TASK = Task(
    load=load,
    build=build,
    loss=cross_entropy,
    score=score,
    training=Training(epochs=40, batch_size=32, lr=0.05, warmup_steps=50),
)
