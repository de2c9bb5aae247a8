from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from tests.recipes.own_tasks import TINY
from thinwire.errors import UsageError
from thinwire.observe.metrics import NoMetrics
from thinwire.observe.results import Row
from thinwire.recipes.config import Training
from thinwire.recipes.loop import (
    are_replicas_identical,
    batches,
    count_steps,
    evaluate,
    learning_rate,
    train,
)
from thinwire.recipes.tasks import Examples


def deal_out(rank: int, world: int, epoch: int) -> list[int]:
    numbers = torch.arange(50)
    training = Training(epochs=1, batch_size=4, lr=0.1)
    return [i for _, seen in batches(Examples(numbers, numbers), training, epoch) for i in seen]


def test_an_epoch_is_dealt_out_without_overlap(pools) -> None:
    first, again, second = (
        [int(i) for share in pools(3).run(deal_out, epoch) for i in share] for epoch in (0, 0, 1)
    )
    assert len(first) == len(set(first)) == 48
    assert first == again
    assert first != second


def score_alone_and_together(rank: int, world: int) -> tuple[float, float]:
    torch.manual_seed(0)
    model, examples = TINY.build(), TINY.load().test
    alone = TINY.score(model(examples.inputs), examples.targets).mean().item()
    return evaluate(model, TINY, examples), alone


def test_the_test_score_counts_every_example_once(pools) -> None:
    for together, alone in pools(4).run(score_alone_and_together):
        assert together == pytest.approx(alone, abs=1e-6)


def notice_one_bit(rank: int, world: int) -> tuple[bool, bool]:
    torch.manual_seed(0)
    model = TINY.build()
    before = are_replicas_identical(model)
    if rank == 1:
        with torch.no_grad():
            weight = model[0].weight
            weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(10.0))
    return before, are_replicas_identical(model)


def test_replicas_that_differ_in_one_bit_are_noticed(pools) -> None:
    assert pools(3).run(notice_one_bit) == [(True, False)] * 3


def train_twice(rank: int, world: int) -> list[Row]:
    data = TINY.load()
    methods = {"dense": tw.Dense(), "adtopk": tw.ADTopK(density=0.1, dense_fallback=False)}
    rows = [
        train(TINY, data, TINY.training, name, method, NoMetrics(), [])
        for name, method in methods.items()
    ]
    dist.barrier()
    return rows


def test_a_row_holds_what_was_measured(pools) -> None:
    for dense, sparse in pools(3).run(train_twice):
        assert dense.asked_density is None
        assert dense.density == 1.0
        assert dense.ratio == pytest.approx(1.0, abs=0.02)
        assert sparse.asked_density == 0.1
        assert 0.05 < sparse.density < 0.4
        assert sparse.ratio > 2
        for row in (dense, sparse):
            assert row.steps == 2 * (150 // 24)
            assert row.replicas_identical
            assert 0 <= row.score <= 1
            assert row.ms_per_step > 0


def test_too_many_workers_for_the_data_is_one_sentence() -> None:
    assert count_steps(100, 3, 8) == 4
    with pytest.raises(
        UsageError, match=r"batch_size is 8 on 13 workers; together .* 100 training"
    ):
        count_steps(100, 13, 8)


def test_the_learning_rate_warms_up_and_ends_near_zero() -> None:
    training = Training(epochs=1, batch_size=1, lr=2.0, warmup_steps=4)
    rates = [learning_rate(training, step, 100) for step in range(100)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0 < rates[-1] < 0.01
