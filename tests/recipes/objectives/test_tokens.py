from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.recipes.objectives.models import Says
from tests.recipes.objectives.sums import summarise
from thinwire.recipes.objectives.tokens import Tokens

KIND = Tokens(vocabulary=2, length=2)


def logits_of(*chances: float) -> Tensor:
    """One stream whose tokens are 1 with these probabilities."""
    return torch.tensor([[[math.log(1 - p), math.log(p)] for p in chances]])


def test_loss_hands_the_carry_on() -> None:
    model = Says((logits_of(0.5, 0.25), "state"))
    inputs = torch.tensor([[0, 1]])
    loss, carry = KIND.loss(model, (inputs, torch.tensor([[1, 0]])), "before")
    assert loss.item() == pytest.approx((math.log(2) + math.log(4 / 3)) / 2)
    assert carry == "state"
    assert model.asked == [(inputs, "before")]


def test_perplexity_is_over_tokens_not_over_batches() -> None:
    """Surprises log 2, log 2 and log 16: their mean is log 4, though the means of the batches are log 2 and log 16."""
    first, _ = KIND.measure(
        Says((logits_of(0.5, 0.5), None)), (torch.zeros(1, 2).long(), torch.tensor([[0, 1]])), None
    )
    second, _ = KIND.measure(
        Says((logits_of(1 / 16), None)), (torch.zeros(1, 1).long(), torch.tensor([[1]])), None
    )
    assert summarise(KIND, first, second) == {"perplexity": pytest.approx(4.0)}


def test_perplexity_of_a_run_that_blew_up_is_infinite() -> None:
    assert KIND.summarise({"surprise": (1e6, 10.0)}) == {"perplexity": math.inf}
