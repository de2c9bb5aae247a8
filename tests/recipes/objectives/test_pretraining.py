from __future__ import annotations

import math

import pytest
import torch

from tests.recipes.objectives.models import Says
from tests.recipes.objectives.sums import summarise
from thinwire.recipes.examples import Batch
from thinwire.recipes.objectives.pretraining import NOT_MASKED, Pretraining

KIND = Pretraining(vocabulary=4, length=3)


def make_batch(targets: list[list[int]], is_next: list[int]) -> Batch:
    ids = torch.zeros(len(targets), 3).long()
    return (ids, ids, ids, torch.tensor(targets), torch.tensor(is_next))


def make_model() -> Says:
    """Every token is as likely as any other but for the last, where token 3 has half; 'next' has three quarters."""
    tokens = torch.zeros(2, 3, 4)
    tokens[:, 2, 3] = math.log(3.0)
    return Says((tokens, torch.tensor([[0.0, math.log(3.0)]]).expand(2, 2)))


def test_only_masked_tokens_are_learned_from() -> None:
    batch = make_batch([[1, NOT_MASKED, 3], [NOT_MASKED] * 3], [1, 0])
    loss, carry = KIND.loss(make_model(), batch, None)
    masked = (math.log(4) + math.log(2)) / 2
    assert loss.item() == pytest.approx(masked + (math.log(4 / 3) + math.log(4)) / 2)
    assert carry is None


def test_a_batch_without_masked_tokens_has_a_finite_loss() -> None:
    loss, _ = KIND.loss(make_model(), make_batch([[NOT_MASKED] * 3] * 2, [1, 1]), None)
    assert loss.item() == pytest.approx(math.log(4 / 3))


def test_metrics_weigh_tokens_and_pairs() -> None:
    first, _ = KIND.measure(make_model(), make_batch([[1, 1, 1], [1, 1, 3]], [1, 0]), None)
    second, _ = KIND.measure(
        make_model(), make_batch([[NOT_MASKED, NOT_MASKED, 3], [NOT_MASKED] * 3], [1, 1]), None
    )
    metrics = summarise(KIND, first, second)
    # Four times log 4, once log 6 (token 1 at the last place), twice log 2.
    masked = (4 * math.log(4) + math.log(6) + 2 * math.log(2)) / 7
    sentences = (3 * math.log(4 / 3) + math.log(4)) / 4
    assert metrics == {
        "loss": pytest.approx(masked + sentences),
        "masked_perplexity": pytest.approx(math.exp(masked)),
        "next_accuracy": 0.75,
    }
