"""Handles that are closed, or dropped without it, and states of ranks that do not belong together."""

from __future__ import annotations

import gc
import threading
import time
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.contracts.adapters import ADAPTERS, make
from tests.contracts.cluster import sparse
from tests.models import batches, fingerprint, make_cnn, train

STATEFUL = {
    "RandomK": tw.RandomK(density=0.05, dense_fallback=False),
    "ACPSGD": tw.ACPSGD(rank=2, dense_fallback=False),
}


def use(adapter: str, rank: int, *, close: bool) -> None:
    model = make_cnn()
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    module, optimizer, handle = make(adapter, model, plain, sparse(), watch=1)
    train(module, optimizer, batches(rank, 2))
    if close:
        handle.close()


def left() -> tuple[int, int]:
    """(threads, descriptors) of this process."""
    gc.collect()
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def drop_job(rank: int, world: int, adapter: str, close: bool) -> list[tuple[int, int]]:
    use(adapter, rank, close=True)
    counts = [left()]
    for _ in range(3):
        use(adapter, rank, close=close)
        gc.collect()
        deadline = time.monotonic() + 30
        while left() > counts[0] and time.monotonic() < deadline:
            time.sleep(0.05)
        counts.append(left())
    return counts


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_handle_leaves_no_threads_and_no_descriptors(pools, adapter, close):
    for counts in pools(2).run(drop_job, adapter, close):
        assert max(counts) == counts[0], counts


def closed_job(rank: int, world: int, adapter: str, average: bool) -> tuple:
    """Gradients after `close`, which are the plain mean."""
    model = make_cnn()
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    options = {} if adapter == "ddp" else {"average": average}
    module, optimizer, handle = make(adapter, model, plain, sparse(), bucket_kb=1, **options)
    train(module, optimizer, batches(rank, 2))
    handle.close()
    optimizer.zero_grad()
    (images, labels), *_ = batches(rank, 1, seed=7)
    nn.functional.cross_entropy(module(images), labels).backward()
    found = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    train(module, optimizer, batches(rank, 2, seed=8))
    return found, fingerprint(model)


@pytest.mark.parametrize(
    ("adapter", "average"), [("ddp", True), ("optimizer", True), ("optimizer", False)]
)
def test_a_closed_handle_averages_densely(pools, adapter, average):
    replies = pools(2).run(closed_job, adapter, average)
    assert replies[0][1] == replies[1][1]
    model = make_cnn()
    for p, mine, theirs in zip(model.parameters(), *(found for found, _ in replies), strict=True):
        assert torch.equal(mine, theirs) and bool(mine.any()) and mine.shape == p.shape


def settings_job(rank: int, world: int) -> list[str]:
    said = []
    for options in ({"bucket_mb": 1 + rank}, {"backward_passes_per_step": 1 + rank}):
        model = make_cnn()
        plain = torch.optim.SGD(model.parameters(), lr=0.05)
        with pytest.raises(tw.ExchangeError) as caught:
            tw.DistributedOptimizer(plain, model=model, method=sparse(), **options)
        said.append(str(caught.value))
    wrapped = tw.DistributedOptimizer(plain, model=model, method=sparse())
    with pytest.raises(tw.ExchangeError, match="backward_passes_per_step differs"):
        wrapped.set_backward_passes_per_step(2 + rank)
    assert wrapped.backward_passes_per_step == 1
    wrapped.close()
    return said


def test_settings_of_the_optimizer_are_the_same_on_all_ranks(pools):
    for said in pools(2).run(settings_job):
        assert [one.split(" differs")[0] for one in said] == [
            "bucket_mb",
            "backward_passes_per_step",
        ]


def behind_job(rank: int, world: int, adapter: str, name: str) -> list[str]:
    model = make_cnn()
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    module, optimizer, handle = make(adapter, model, plain, STATEFUL[name])
    states = []
    train(module, optimizer, batches(rank, 3), lambda _: states.append(handle.state_dict()))
    said = []
    of_another_model = deepcopy(states[-1])
    if rank == 1:
        of_another_model["ranks"]["rank1"]["memory"]["residual"]["other"] = torch.zeros(1)
    other = states[-1] if rank == 0 else {"version": 99}
    for state in (states[-1 - rank], other, of_another_model):
        with pytest.raises((tw.ExchangeError, tw.UsageError)) as caught:
            handle.load_state_dict(state)
        said.append(str(caught.value))
    handle.load_state_dict(states[-1])
    train(module, optimizer, batches(rank, 2))
    handle.close()
    return said


@pytest.mark.parametrize("name", STATEFUL)
def test_a_rank_that_is_a_step_behind_is_refused_everywhere(pools, name):
    mine, theirs = pools(2).run(behind_job, "ddp", name)
    assert mine[0] == theirs[0]
    assert "the step of the state differs between ranks: rank 0 has 3, rank 1 has 2" in mine[0]
    assert "rank 1 has a state that it cannot load" in mine[1]
    assert "version 99" in theirs[1]
    assert "rank 1 has a state that it cannot load" in mine[2]
    assert "state holds parameter 'other'" in theirs[2]
