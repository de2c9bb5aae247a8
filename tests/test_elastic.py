"""Elastic training: restarts after a worker really died, a changed number of workers, handles that move to other groups."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.contracts.cluster import sparse
from tests.elastic_job import run_steps
from tests.lanes import slow
from tests.models import batches, fingerprint, make_cnn, train
from tests.pool import Pool

ROOT = Path(__file__).parents[1]


def run_job(folder: Path, workers: int, steps: int, kill_at: int, restarts: int) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        # See docs/fsdp.md: a restart would meet the addresses of the first life.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        f"--nproc-per-node={workers}",
        f"--max-restarts={restarts}",
        "--monitor-interval=0.1",
    ]
    command += ["-m", "tests.elastic_job", str(folder), str(steps), str(kill_at)]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-3000:]


def calm_job(rank: int, world: int, folder: str, steps: int) -> tuple[bytes, int]:
    """The same training without torchrun."""
    return run_steps(folder, steps)


def test_a_job_that_stops_between_snapshots_ends_as_if_nothing_had_been(pools, tmp_path):
    """A killed worker and torchrun, which starts it anew, are tried in `make slow`."""
    pools(2).run(calm_job, str(tmp_path / "stopped"), 6)
    ends = pools(2).run(calm_job, str(tmp_path / "stopped"), 8)
    assert {began for _, began in ends} == {5}
    (calm, began), _ = pools(2).run(calm_job, str(tmp_path / "calm"), 8)
    assert began == 0 and {end for end, _ in ends} == {calm}


@pytest.mark.slow
def test_a_killed_worker_is_restarted_and_the_job_ends_as_if_nothing_had_been(pools, tmp_path):
    run_job(tmp_path / "killed", 2, 8, kill_at=6, restarts=1)
    ended = (tmp_path / "killed" / "end2-from5").read_bytes()
    (calm, began), _ = pools(2).run(calm_job, str(tmp_path / "calm"), 8)
    assert began == 0 and calm == ended


def test_another_number_of_workers_goes_on_with_the_mean_or_nothing(pools, tmp_path):
    pools(2).run(calm_job, str(tmp_path), 5)
    ends = pools(3).run(calm_job, str(tmp_path), 7)
    assert {began for _, began in ends} == {5} and len({end for end, _ in ends}) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_of_twenty_restarts_succeed(pools, tmp_path):
    (calm, _), _ = pools(2).run(calm_job, str(tmp_path / "calm"), 12)
    for number in range(20):
        run_job(tmp_path / str(number), 2, 12, kill_at=6 + number % 4, restarts=1)
        assert (tmp_path / str(number) / "end2-from5").read_bytes() == calm


# -- handles that move -------------------------------------------------------------------------------------------------


def residuals(handle: tw.Handle) -> dict[str, torch.Tensor]:
    return {row.info.name: handle.residual(row.info.name) for row in handle.plan()}


def optimizer_job(rank: int, world: int, method: Any) -> None:
    """Of three ranks two go on, then three again: what the remaining ones hold stays."""
    model = make_cnn()
    optimizer = tw.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model=model, method=method
    )
    handle = optimizer.handle
    data = list(batches(rank, 9))
    train(model, optimizer, iter(data[:3]))
    pair = dist.new_group([0, 1])
    before = residuals(handle)
    if rank < 2:
        handle.regroup(pair)
        assert handle.world == 2 and handle.reducer.step == 3
        assert all(torch.equal(held, before[name]) for name, held in residuals(handle).items())
        train(model, optimizer, iter(data[3:6]))
        prints: list[bytes] = [b""] * 2
        dist.all_gather_object(prints, fingerprint(model), group=pair)
        assert prints[0] == prints[1]
    before = residuals(handle)
    # The third was away for three steps: its model and its counters are behind.
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    handle.regroup(dist.group.WORLD)
    assert handle.world == 3 and handle.reducer.step == 6
    assert all(torch.equal(held, before[name]) for name, held in residuals(handle).items())
    train(model, optimizer, iter(data[6:]))
    everyone: list[bytes] = [b""] * world
    dist.all_gather_object(everyone, fingerprint(model))
    assert len(set(everyone)) == 1
    optimizer.close()


@pytest.mark.parametrize(
    "method",
    [sparse(), tw.OkTopK(density=0.05), tw.PowerSGD(rank=2, dense_fallback=False)],
    ids=lambda method: type(method).__name__,
)
def test_a_handle_moves_to_fewer_and_to_more_ranks(pools, method):
    pools(3).run(optimizer_job, method)


def ddp_job(rank: int, world: int) -> None:
    """DDP is wrapped anew; the handle goes over with all it holds, and a rank that is new joins."""
    pair = dist.new_group([0, 1])
    model = make_cnn()
    handle = None
    if rank < 2:
        ddp = DistributedDataParallel(model, process_group=pair)
        handle = tw.attach(ddp, sparse())
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), batches(rank, 3))
        with pytest.raises(tw.UsageError, match=r"DDP cannot change its process group"):
            handle.regroup(dist.group.WORLD)
        before = residuals(handle)
    whole = DistributedDataParallel(model)
    if handle is not None:
        handle.regroup(model=whole)
        assert all(torch.equal(held, before[name]) for name, held in residuals(handle).items())
    else:
        handle = tw.attach(whole, sparse())
        handle.join()
    assert handle.world == 3 and handle.reducer.step == 3
    train(whole, torch.optim.SGD(whole.parameters(), lr=0.05), batches(rank, 3))
    prints: list[bytes] = [b""] * world
    dist.all_gather_object(prints, fingerprint(model))
    assert len(set(prints)) == 1 and handle.reducer.step == 6
    handle.close()


def joined_late_job(rank: int, world: int, before: int, dense_first: bool) -> None:
    """A rank that has held nothing back so far joins right before a method turns dense, or later."""
    sparsely = tw.TopK(density=0.1, dense_fallback=False)
    first = ((0, tw.Dense()), (2, sparsely)) if dense_first else ((0, sparsely),)
    method = tw.Timeline(phases=(*first, (4, tw.Dense()), (7, sparsely)))
    pair = dist.new_group([0, 1])
    model = make_cnn()
    handle = None
    if rank < 2:
        ddp = DistributedDataParallel(model, process_group=pair)
        handle = tw.attach(ddp, method)
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), batches(rank, before))
    whole = DistributedDataParallel(model)
    if handle is not None:
        handle.regroup(model=whole)
    else:
        handle = tw.attach(whole, method)
        handle.join()
    train(whole, torch.optim.SGD(whole.parameters(), lr=0.05), batches(rank, 8 - before))
    prints: list[bytes] = [b""] * world
    dist.all_gather_object(prints, fingerprint(model))
    assert len(set(prints)) == 1 and handle.reducer.step == 8
    handle.close()


@pytest.mark.parametrize("dense_first", [True, False])
@pytest.mark.parametrize("before", range(1, 7))
def test_who_joins_sends_what_the_others_send(pools, before, dense_first):
    pools(3).run(joined_late_job, before, dense_first)


def test_under_ddp_the_model_is_wrapped_anew_and_the_handle_moves(pools):
    pools(3).run(ddp_job)


def momentum_job(rank: int, world: int) -> None:
    """The momentum of dense parameters and of weight decay is the handle's, and a new rank has to have it."""
    pair, model = dist.new_group([0, 1]), make_cnn()
    own = DistributedDataParallel(model, process_group=pair) if rank < 2 else None
    if own is not None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        handle = tw.attach(own, tw.DGC(density=0.1), optimizer=optimizer)
        train(own, optimizer, batches(rank, 3))
    whole = DistributedDataParallel(model)
    if own is not None:
        handle.regroup(model=whole)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        handle = tw.attach(whole, tw.DGC(density=0.1), optimizer=optimizer)
        handle.join()
    train(whole, optimizer, batches(rank, 3))
    prints: list[bytes] = [b""] * world
    dist.all_gather_object(prints, fingerprint(model))
    assert len(set(prints)) == 1
    handle.close()


def test_a_new_rank_takes_over_momentum_that_is_alike_on_all(pools):
    pools(3).run(momentum_job)


def unsent_job(rank: int, world: int) -> None:
    pair, model = dist.new_group([0, 1]), make_cnn()
    own = DistributedDataParallel(model, process_group=pair) if rank < 2 else None
    if own is not None:
        handle = tw.attach(own, sparse())
        train(own, torch.optim.SGD(own.parameters(), lr=0.05), batches(rank, 3))
        handle.switch(tw.Dense())
    whole = DistributedDataParallel(model)
    if own is not None:
        handle.regroup(model=whole)
    else:
        handle = tw.attach(whole, tw.Dense())
        handle.join()
    train(whole, torch.optim.SGD(whole.parameters(), lr=0.05), batches(rank, 2))
    assert not any(held.any() for held in residuals(handle).values())
    prints: list[bytes] = [b""] * world
    dist.all_gather_object(prints, fingerprint(model))
    assert len(set(prints)) == 1
    handle.close()


def test_a_rank_joins_while_what_was_held_back_is_about_to_be_sent(pools):
    pools(3).run(unsent_job)


def killed_job(rank: int, world: int, skippable: bool) -> tuple[bool, bool, bytes]:
    """Of three ranks one is killed in the middle of a step. The others go on in a group of their own with the next batch."""
    model = make_cnn()
    optimizer = tw.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        model=model,
        method=sparse(),
        skippable=skippable,
    )
    data = list(batches(rank, 6))
    train(model, optimizer, iter(data[:3]))
    before = residuals(optimizer.handle)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(tw.ExchangeError, match="a worker has died"):
        train(model, optimizer, iter(data[3:4]))
    pair = dist.new_group([0, 1], use_local_synchronization=True)
    optimizer.handle.regroup(pair)
    after = residuals(optimizer.handle)
    same = all(torch.equal(held, before[name]) for name, held in after.items())
    finite = all(bool(held.isfinite().all()) for held in after.values())
    train(model, optimizer, iter(data[4:]))
    return same, finite, fingerprint(model)


@pytest.mark.workers
@pytest.mark.parametrize("skippable", [True, slow(False)])
def test_survivors_of_a_killed_worker_go_on(skippable):
    """What the failed step had sent is taken back. Where steps cannot be skipped its gradient stays in memory."""
    pool = Pool(3, group_timeout=timedelta(seconds=20))
    try:
        (ok, first), (fine, second), (alive, _) = pool.attempt(killed_job, skippable)
    finally:
        pool.stop()
    assert ok and fine and not alive, f"{first}\n{second}"
    assert first == second
    same, finite, _ = first
    assert same == skippable and finite
