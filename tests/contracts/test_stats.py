"""Contract 8: density, bytes and ratio are shown as they are."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.contracts.adapters import ADAPTERS, make
from tests.contracts.cluster import Cluster, sparse
from tests.models import batches, make_cnn, train


def counted_job(rank: int, world: int, adapter: str) -> None:
    model = make_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    # A row of 9 cannot send less than one entry, so that the realised density is not the one asked for.
    module, optimizer, handle = make(adapter, model, optimizer, sparse("bf16", density=0.01))
    train(module, optimizer, batches(rank, 3))
    stats = handle.stats()
    numel = sum(p.numel() for p in model.parameters())
    assert stats.steps == 3
    assert stats.dense_bytes == round(3 * 2 * (world - 1) / world * 4 * numel)
    assert stats.wire_bytes == handle.ledger.sent_bytes()
    by_parameter = sum(row.wire_bytes for row in stats.parameters.values())
    assert abs(by_parameter - stats.wire_bytes) <= 0.02 * stats.wire_bytes
    assert stats.ratio == stats.dense_bytes / stats.wire_bytes > 1
    assert stats.parameters["0.weight"].density == 1 / 9
    assert stats.parameters["0.bias"].density == 1.0
    compressed = {row.info.name: row for row in handle.plan() if not row.dense}
    entries = sum(stats.parameters[name].entries for name in compressed)
    elements = 3 * sum(row.info.numel for row in compressed.values())
    assert stats.density == entries / elements != 0.01
    assert stats.memory_bytes >= 4 * elements // 3
    handle.close()


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_bytes_and_density_are_what_was_sent_not_what_was_asked_for(pools, adapter):
    pools(3).run(counted_job, adapter)


def alone_job(rank: int, world: int) -> None:
    model = make_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    module, optimizer, handle = make("ddp", model, optimizer, sparse("fp32", density=0.1))
    train(module, optimizer, batches(rank, 1))
    stats = handle.stats()
    assert (stats.wire_bytes, stats.dense_bytes, stats.ratio) == (0, 0, 1.0)
    # Rows of units that are off have a place on the wire all the same.
    assert stats.parameters["6.weight"].entries == 64 * 25
    assert 0 < model[6].weight.grad.count_nonzero() <= 64 * 25
    handle.switch(tw.Dense())
    handle.close()


def test_alone_nothing_travels_and_every_entry_is_counted(pools):
    pools(1).run(alone_job)


def resumed_job(rank: int, world: int) -> None:
    model = make_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    module, optimizer, handle = make("ddp", model, optimizer, sparse())
    train(module, optimizer, batches(rank, 2))
    per_step, state = handle.stats().wire_bytes_per_step, handle.state_dict()
    handle.close()
    again = tw.attach(module, sparse())
    again.load_state_dict(state)
    train(module, optimizer, batches(rank, 1))
    stats = again.stats()
    assert (stats.steps, stats.counted_steps) == (3, 1)
    assert stats.wire_bytes_per_step == pytest.approx(per_step, rel=0.02)
    again.close()


def test_bytes_per_step_are_those_of_the_counted_steps_after_a_resume(pools):
    pools(3).run(resumed_job)


def test_counts_do_not_pile_up_while_buckets_and_densities_change():
    cluster = Cluster(2, tw.GaussianK(density=0.05, dense_fallback=False))
    for step in range(6):
        cluster.rebucket()
        cluster.switch(tw.GaussianK(density=0.05 + 0.01 * step, dense_fallback=False))
        cluster.step(cluster.random(step))
    tally = cluster.reducers[0].tally
    assert len(tally.uncounted) == 1
    assert tally.stats(6, 0).parameters["linear"].exchanges == 6
