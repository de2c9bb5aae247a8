from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.gradients import slot_of
from tests.models import batches, make_cnn, train
from thinwire.compress.sparse import PartsRoute
from thinwire.select.interleave import ALL_DIMENSION, Interleaved
from thinwire.select.threshold_reused import ThresholdTopK
from thinwire.select.topk import AllDimensionTopK, TradTopK


def interleaved(every: int = 2, **options) -> Interleaved:
    return Interleaved(AllDimensionTopK(0.05), TradTopK(0.05), every, **options)


def begin(session, count: int, name: str = "w") -> str:
    """The mode of one tensor's next exchange."""
    (mode,) = session.begin([name], [count])
    return mode


@pytest.mark.parametrize("every", [2, 3, 4])
def test_every_nth_step_of_every_tensor_is_global(every):
    session = interleaved(every).session()
    for name in ("a", "b", "c"):
        modes = [begin(session, step, name) for step in range(12)]
        assert [mode != ALL_DIMENSION for mode in modes] == [
            step % every == every - 1 for step in range(12)
        ]


def test_global_turns_are_one_row_and_the_others_one_per_dimension():
    session = interleaved().session()
    slot = slot_of("w", (8, 100))
    assert session.turn((begin(session, 0),)).rows(0, slot).count == 8
    assert session.turn((begin(session, 1),)).rows(0, slot).count == 1


def test_without_a_known_length_or_a_stable_threshold_there_is_no_last_quarter():
    plain = Interleaved(AllDimensionTopK(0.05), ThresholdTopK(0.05), 2).session()
    assert begin(plain, 1_000_001) != ALL_DIMENSION
    unstable = Interleaved(
        AllDimensionTopK(0.05), ThresholdTopK(0.05), 2, total_steps=100
    ).session()
    assert begin(unstable, 99) != ALL_DIMENSION


def test_stable_tensors_are_all_dimension_only_in_the_last_quarter():
    session = Interleaved(AllDimensionTopK(0.05), ThresholdTopK(0.05), 2, total_steps=100).session()
    session.thresholds.watch("w").stable = True
    assert begin(session, 73) != ALL_DIMENSION
    assert all(begin(session, step) == ALL_DIMENSION for step in range(75, 100))


@pytest.mark.parametrize("value", [True, False, 1, 0, -2, 2.0, "2"])
def test_interleave_takes_a_number_of_steps_and_nothing_else(value):
    with pytest.raises(tw.UsageError, match="interleave is"):
        tw.ADTopK(density=0.01, interleave=value)


def test_a_threshold_needs_global_turns():
    with pytest.raises(tw.UsageError, match="interleave is None"):
        tw.ADTopK(density=0.01, threshold=True)


def modes_job(rank: int, world: int, threshold: bool) -> list[dict[str, int]]:
    """Rows per parameter in each of six steps, from what really went into the tables."""
    ddp = nn.parallel.DistributedDataParallel(make_cnn(), bucket_cap_mb=0.02)
    method = tw.ADTopK(density=0.05, interleave=2, threshold=threshold, dense_fallback=False)
    policy = [tw.rule("8.*", all_dimension=True)]
    handle = tw.attach(ddp, method, policy=policy)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    seen: list[dict[str, int]] = []

    def record(step: int) -> None:
        routes = [route for plan in handle.reducer.plans.values() for route in plan.routes]
        sparse = [route for route in routes if isinstance(route, PartsRoute)]
        tables = [rows for route in sparse for rows in route.task.codec.table.rows]
        seen.append({rows.slot.name: rows.count for rows in tables})

    train(ddp, optimizer, batches(rank, 6), record)
    handle.close()
    return seen


@pytest.mark.parametrize("threshold", [False, True])
def test_alternation_is_the_same_on_every_rank_and_spares_forced_layers(pools, threshold):
    results = pools(3).run(modes_job, threshold)
    assert results[0] == results[1] == results[2]
    for step, rows in enumerate(results[0]):
        assert rows["6.weight"] == (1 if step % 2 else 64)
        assert rows["8.weight"] == 10


def divergent_job(rank: int, world: int) -> bytes:
    """Gradients of very different size and spread on each rank, far past the warm-up."""
    from tests.models import fingerprint

    ddp = nn.parallel.DistributedDataParallel(make_cnn(), bucket_cap_mb=0.02)
    method = tw.ADTopK(
        density=0.05,
        interleave=2,
        threshold=True,
        monitor=tw.select.Monitor(warmup=3),
        total_steps=80,
    )
    handle = tw.attach(ddp, method)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    for step, (images, labels) in enumerate(batches(rank, 80)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(images * 10**rank), labels)
        (loss * (1 + rank * (step % 7))).backward()
        optimizer.step()
    assert handle.stats().steps == 80
    handle.close()
    return fingerprint(ddp)


def test_rank_divergent_gradients_keep_shapes_and_replicas_equal(pools):
    assert len(set(pools(3).run(divergent_job))) == 1


def test_tables_of_mixed_modes_do_not_pile_up():
    """Slots that go from one mode to another one by one; the bits do not depend on what is kept."""
    method = tw.ADTopK(
        density=0.1,
        interleave=2,
        threshold=True,
        dense_fallback=False,
        monitor=tw.select.Monitor(warmup=1),
        updater=tw.select.Updater(tau=1, floor=1),
    )
    shapes = {f"slot{n}": (8, 5 + n) for n in range(4)}
    updates = []
    for most in (2, 1000):
        cluster = Cluster(2, method, shapes=shapes)
        cluster.step(cluster.random(0))
        for reducer in cluster.reducers:
            (plan,) = reducer.plans.values()
            plan.most_ways = most
        updates.append([cluster.step(cluster.random(seed)) for seed in range(1, 24)])
        assert len(plan.ways) <= most
    assert len(plan.ways) > 2
    for ours, theirs in zip(*updates, strict=True):
        assert all(torch.equal(ours[0][name], theirs[0][name]) for name in shapes)
