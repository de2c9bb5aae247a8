from __future__ import annotations

import math

import pytest
import torch

from tests.recipes.objectives.models import Says
from tests.recipes.objectives.sums import summarise
from thinwire.recipes.objectives.images import Images


def make_kind(classes: int) -> Images:
    return Images(channels=1, height=2, width=2, classes=classes)


def test_loss_is_the_mean_surprise() -> None:
    model = Says(torch.tensor([[0.0, math.log(3.0)], [0.0, math.log(3.0)]]))
    batch = (torch.zeros(2, 1, 2, 2), torch.tensor([1, 0]))
    loss, carry = make_kind(2).loss(model, batch, None)
    assert loss.item() == pytest.approx((math.log(4 / 3) + math.log(4)) / 2)
    assert carry is None


def test_top1_and_top5_are_fractions() -> None:
    logits = torch.tensor([7.0, 6, 5, 4, 3, 2, 1]).expand(4, 7)
    labels = torch.tensor([0, 4, 5, 0])
    totals, _ = make_kind(7).measure(Says(logits), (torch.zeros(4, 1, 2, 2), labels), None)
    assert summarise(make_kind(7), totals) == {"top1": 0.5, "top5": 0.75}


def test_fewer_than_five_classes() -> None:
    totals, _ = make_kind(2).measure(
        Says(torch.tensor([[1.0, 0.0]])), (torch.zeros(1, 1, 2, 2), torch.tensor([1])), None
    )
    assert summarise(make_kind(2), totals) == {"top1": 0.0, "top5": 1.0}
