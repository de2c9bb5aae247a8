"""Digits: 1797 real handwritten digits of 8 x 8 pixels, which scikit-learn brings along."""

from __future__ import annotations

import torch

from thinwire.recipes.data.pixels import Normalisation
from thinwire.recipes.data.synthetic import make_images
from thinwire.recipes.examples import Data, DataOptions, TensorExamples
from thinwire.recipes.objectives.images import Images

KIND = Images(channels=1, height=8, width=8, classes=10)
TEST_EXAMPLES = 360
BRIGHTEST_PIXEL = 16.0


def load(options: DataOptions) -> Data:
    """The digits in [-1, 1], split once and for all: the split does not follow the run's seed."""
    if options.synthetic:
        return make_images(KIND, Normalisation.of([0.5], [0.5]), options)
    from sklearn.datasets import load_digits

    digits = load_digits()
    inputs = torch.from_numpy(digits.images).float().unsqueeze(1) / (BRIGHTEST_PIXEL / 2) - 1
    targets = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_EXAMPLES], order[TEST_EXAMPLES:]
    return Data(
        KIND,
        TensorExamples((inputs[train], targets[train])),
        TensorExamples((inputs[test], targets[test])),
    )
