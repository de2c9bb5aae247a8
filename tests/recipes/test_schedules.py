from __future__ import annotations

from typing import Any

import pytest

from thinwire.errors import UsageError
from thinwire.recipes.config import Training
from thinwire.recipes.schedules import LearningRate


def schedule(
    *, steps_per_epoch: int = 10, workers: int = 1, up: bool = True, **setting: Any
) -> LearningRate:
    training = Training(**{"epochs": 10, "batch_size": 1, "lr": 2.0, **setting})
    return LearningRate(
        training, workers=workers, steps_per_epoch=steps_per_epoch, higher_is_better=up
    )


def test_the_learning_rate_warms_up_and_ends_near_zero() -> None:
    learning_rate = schedule(warmup_steps=4)
    rates = [learning_rate.at(step) for step in range(100)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0 < rates[-1] < 0.01


def test_the_shapes() -> None:
    constant = schedule(schedule="constant", warmup_epochs=0.5)
    assert [constant.at(s) for s in (0, 4, 5, 99)] == [0.4, 2.0, 2.0, 2.0]
    linear = schedule(schedule="linear")
    assert [linear.at(s) for s in (0, 50, 75)] == [2.0, 1.0, 0.5]
    multistep = schedule(schedule="multistep", milestones=(3, 6), gamma=0.5)
    assert [multistep.at(s) for s in (0, 29, 30, 59, 60)] == [2.0, 2.0, 1.0, 1.0, 0.5]
    exponential = schedule(schedule="exponential", gamma=0.5)
    assert [exponential.at(s) for s in (9, 10, 20)] == [2.0, 1.0, 0.5]


def test_plateau_listens_and_remembers() -> None:
    first, second = (schedule(schedule="plateau", patience=1, up=False) for _ in range(2))
    for loss in (3.0, 2.0, 2.0):
        first.observe(loss)
    assert first.at(50) == 2.0
    second.load_state_dict(first.state_dict())
    second.observe(2.5)
    assert second.at(50) == pytest.approx(0.2)


def test_the_rate_follows_workers_and_micro_batches_if_asked() -> None:
    assert schedule(schedule="constant", lr_scaling="linear", workers=8, accumulate=2).at(0) == 32.0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"schedule": "cosin"}, "schedule is 'cosin'; it must be one of 'constant', 'cosine'"),
        ({"warmup_steps": 3, "warmup_epochs": 1}, "give only one of them"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0; it must be a positive number"),
        ({"accumulate": 0}, "accumulate is 0; it must be a whole number of at least 1"),
        ({"gamma": 0}, "gamma is 0; it must be above 0"),
    ],
)
def test_what_cannot_be_is_one_sentence(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        schedule(**setting)
