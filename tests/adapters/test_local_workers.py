"""Workers that come late, die and come back: who is left goes on, or ends clearly and is resumed to the bit."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from tests.lanes import slow
from tests.local_jobs import adamw, inner_step, make_models, sgd, values
from tests.pool import Pool


def come_late(rank, world, method, settings):
    """Two train, then a third comes, as the first rank of the new group."""
    pair = dist.new_group([1, 2])
    model = nn.Sequential(*make_models(1)[0], nn.BatchNorm1d(8))
    with torch.no_grad():
        model[0].bias.add_(rank)
        model[2].bias.requires_grad_(False).add_(rank)
    optimizer = sgd(model)
    settings = {"every": 2, "deterministic": True, **settings}
    if rank == 0:
        local = tw.LocalSteps(model, optimizer, method, **settings)
        local.join()
    else:
        local = tw.LocalSteps(model, optimizer, method, process_group=pair, **settings)
        for step in range(7):
            inner_step(model, optimizer, rank, step)
        ours, held = values(model), local.handle.residual("0.weight")
        local.regroup(dist.group.WORLD)
        if not settings.get("delay"):
            assert torch.equal(ours, values(model))
            assert torch.equal(held, local.handle.residual("0.weight"))
    met = (
        local.steps,
        local.rounds,
        local.handle.reducer.step,
        model[3].running_var.isfinite().all(),
    )
    for step in range(7, 14):
        inner_step(model, optimizer, rank, step)
    point = [tensor.detach().clone() for tensor in local.point.tensors.values()]
    local.finish()
    found = values(model)
    local.close()
    return met, point, found


COMING = {
    "dense": tw.Dense(),
    "RandomK": tw.RandomK(density=0.1, dense_fallback=False),
    "warmup": tw.TopK(
        density=tw.warmup([1.0, 0.5, 0.25], final=0.05, every=2), dense_fallback=False
    ),
    "Timeline": tw.Timeline(
        phases=((0, tw.Dense()), (3, tw.Quantized(bits=4, dense_fallback=False)))
    ),
    "PowerSGD": tw.PowerSGD(rank=2, dense_fallback=False),
}


ALONE, IN_TURN, DELAYED = {}, {"fragments": 2}, {"every": 3, "delay": 1}
QUICK = [("RandomK", IN_TURN), ("warmup", ALONE), ("Timeline", DELAYED)]


@pytest.mark.workers
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        case if case in QUICK else slow(*case)
        for case in itertools.product(COMING, (ALONE, IN_TURN, DELAYED))
    ],
    ids=str,
)
def test_a_worker_that_comes_late_goes_on_as_the_others(pools, name, settings):
    results = pools(3).run(come_late, COMING[name], settings)
    for met, point, found in results:
        assert met == results[0][0]
        assert all(map(torch.equal, point, results[0][1])) and torch.equal(found, results[0][2])


def die_in_a_round(rank, world):
    model = make_models(1)[0]
    optimizer = sgd(model)
    tw.LocalSteps(model, optimizer, every=2)
    for step in range(4):
        if rank == 1 and step == 3:
            os._exit(3)
        inner_step(model, optimizer, rank, step)


@pytest.mark.workers
def test_the_others_end_clearly_if_a_worker_dies_in_a_round():
    pool = Pool(3, timedelta(seconds=20))
    replies = pool.attempt(die_in_a_round)
    pool.stop()
    assert replies[1] == (False, "the process died")
    for rank in (0, 2):
        ok, said = replies[rank]
        assert not ok and "ExchangeError" in said and "start again from a checkpoint" in said


def lose_one(rank, world):
    """One of three dies in a round; the others go on without it."""
    model = make_models(1)[0]
    optimizer = sgd(model)
    method = tw.TopK(density=0.1, dense_fallback=False)
    local = tw.LocalSteps(model, optimizer, method, every=2, delay=1, deterministic=True)
    for step in range(12):
        if rank == 1 and step == 4:
            os._exit(3)
        try:
            inner_step(model, optimizer, rank, step)
        except tw.ExchangeError:
            local.regroup(dist.new_group([0, 2], use_local_synchronization=True))
    local.finish()
    return values(model), local.steps, local.rounds, local.handle.world


@pytest.mark.workers
def test_the_others_go_on_without_a_worker_that_died():
    pool = Pool(3, timedelta(seconds=20))
    replies = pool.attempt(lose_one)
    pool.stop()
    (_, first), (_, dead), (_, last) = replies
    assert dead == "the process died"
    assert torch.equal(first[0], last[0]) and first[1:] == last[1:]
    # Who had finished the last round of the three may have gone on for a round more than the other.
    assert first[1] >= 12 and first[3] == 2


def train_and_save(rank, world, folder, method, settings, killed):
    """Twelve steps, saved after every fourth or begun from what was saved; one worker may die in a round."""
    model = make_models(1)[0]
    optimizer = adamw(model)
    parts = {"model": model, "optimizer": optimizer}
    parts["local"] = tw.LocalSteps(model, optimizer, method, **settings)
    begin = 0
    for saved in sorted(folder.glob(f"*-rank{rank}.pt"))[-1:]:
        begin = int(saved.name[:2])
        for name, state in torch.load(saved, weights_only=True).items():
            parts[name].load_state_dict(state)
    for step in range(begin, 12):
        if step % 4 == 0 and step > begin:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save(states, folder / f"{step:02}-rank{rank}.pt")
        if killed and rank == 1 and step == 5:
            os._exit(3)
        inner_step(model, optimizer, rank, step)
    parts["local"].finish()
    return begin, values(model)


@pytest.mark.workers
@pytest.mark.parametrize("delay", [0, 1])
def test_a_job_that_lost_a_worker_ends_as_if_nothing_had_been(pools, tmp_path, delay):
    settings = {"every": 6, "fragments": 2, "delay": delay, "deterministic": True}
    method = tw.TopK(density=0.1, dense_fallback=False)
    disturbed, calm = tmp_path / "disturbed", tmp_path / "calm"
    for folder in (disturbed, calm):
        folder.mkdir()
    pool = Pool(3, timedelta(seconds=20))
    replies = pool.attempt(train_and_save, disturbed, method, settings, True)
    pool.stop()
    assert not any(ok for ok, _ in replies)
    ends = pools(3).run(train_and_save, disturbed, method, settings, False)
    wanted = pools(3).run(train_and_save, calm, method, settings, False)
    assert {begin for begin, _ in ends} == {4} and {begin for begin, _ in wanted} == {0}
    assert all(torch.equal(end, wanted[0][1]) for _, end in (*ends, *wanted))
