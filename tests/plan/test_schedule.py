"""Schedules of densities and of methods: right in both directions, resumable, the same on all ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.contracts.cluster import Cluster, same_bits
from tests.models import batches, fingerprint, make_cnn, train
from thinwire.errors import UsageError
from thinwire.memory.momentum import MomentumCorrection
from thinwire.methods.base import DenseMomentum
from thinwire.methods.dgc import DGC
from thinwire.methods.schedule import Schedule, exponential_warmup, warmup
from thinwire.methods.timeline import Timeline
from thinwire.plan.planner import Planner

SHAPES = {"linear": (40, 50), "bias": (8,)}


def sent(cluster):
    return [
        int((a != 0).sum())
        for a in (cluster.accepted(r).get("linear", torch.zeros(1)) for r in range(cluster.world))
    ]


def test_list_holds_each_density_for_its_steps():
    schedule = warmup([1.0, 0.25, 0.0625], final=0.01, every=10)
    assert [schedule.at(s) for s in (0, 9, 10, 19, 20, 29, 30, 10**9)] == [
        *(1.0, 1.0, 0.25, 0.25, 0.0625, 0.0625, 0.01, 0.01)
    ]


def test_exponential_falls_from_start_to_final():
    for every in (1, 7):
        schedule = exponential_warmup(final=0.001, steps=100, every=every, dense=5)
        values = [schedule.at(step) for step in range(120)]
        assert values[:5] == [1.0] * 5 and values[5] == 0.25 and values[105:] == [0.001] * 15
        assert all(later <= earlier for earlier, later in pairwise(values))
        assert pytest.approx(values[55], rel=0.5) == 0.25 * (0.001 / 0.25) ** 0.5
    assert len(exponential_warmup(final=0.001, steps=100_000).densities) < 130


def test_scheduled_density_is_what_is_sent_and_nothing_is_lost_on_the_way():
    schedule = Schedule((0, 2, 3, 5), (0.5, 1.0, 0.1, 0.02))
    method = tw.TopK(density=schedule, values="fp32", dense_fallback=False)
    cluster = Cluster(3, method, shapes=SHAPES)
    entries = [1000, 1000, 0, 200, 200, 40, 40]
    for step, expected in enumerate(entries):
        before = [cluster.residuals(r)["linear"] for r in range(3)]
        gradients = cluster.random(step)
        updates = cluster.step(gradients)
        if expected:
            assert sent(cluster) == [expected] * 3
        after = [cluster.residuals(r)["linear"] for r in range(3)]
        c = sum(before[r] + gradients[r]["linear"] for r in range(3))
        total = 3 * updates[0]["linear"] + sum(after)
        assert (total - c).abs().sum() <= 1e-6 * c.abs().sum()
        assert all(same_bits(update["linear"], updates[0]["linear"]) for update in updates)
        if not expected:
            assert not any(held.any() for held in after)


def test_momentum_goes_through_a_schedule_with_a_dense_middle():
    memory = MomentumCorrection(0.9, False, masking=False)
    method = DGC(
        density=Schedule((0, 3, 6), (1e-9 + 0.9999999, 1.0, 0.9999999)),
        memory=memory,
        values="fp32",
        dense_fallback=False,
        sample_ratio=1.0,
    )
    cluster = Cluster(2, method, shapes={"linear": (40, 50)})
    u = torch.zeros(40, 50)
    for step in range(9):
        gradients = cluster.random(step)
        update = cluster.step(gradients)[0]["linear"]
        u = 0.9 * u + sum(g["linear"] for g in gradients) / 2
        # All but one entry is sent, so the update is u but for what one entry holds back.
        assert ((update - u).abs() > 1e-4).sum() <= 4


def test_methods_follow_one_another():
    phases = (
        (0, tw.Dense()),
        (2, tw.TopK(density=0.1, dense_fallback=False)),
        (4, tw.ADTopK(density=0.02, dense_fallback=False)),
        (6, tw.Dense()),
    )
    cluster = Cluster(2, Timeline(phases=phases), shapes=SHAPES)
    names = []
    for step in range(8):
        cluster.step(cluster.random(step))
        names.append(type(cluster.reducers[0].assignments.by_name["linear"].plan.method).__name__)
    assert names == ["Dense", "Dense", "TopK", "TopK", "ADTopK", "ADTopK", "Dense", "Dense"]
    assert not cluster.residuals(0)["linear"].any()


def test_phases_that_cannot_work_are_refused_at_the_beginning():
    infos = Cluster(1, tw.Dense(), shapes=SHAPES).infos.values()
    wrong_axis = tw.ADTopK(axis=7)
    mixed = DGC(memory=MomentumCorrection(0.9, False), dense_fallback=False)
    for later, match in ((wrong_axis, "axis"), (mixed, "momentum")):
        phases = ((0, tw.TopK()), (5, later), (9, tw.Dense()))
        with pytest.raises(UsageError, match=match):
            Planner(infos, Timeline(phases=phases), [], 2).plan(0)


def test_timeline_hands_momentum_to_its_dense_phases():
    bound = Timeline(phases=((0, tw.Dense()), (5, DGC()))).with_momentum(0.9, True)
    assert bound.at(0) == DenseMomentum(momentum=0.9, nesterov=True)
    assert bound.at(7).memory == MomentumCorrection(0.9, True)


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_resume_anywhere_in_a_schedule_continues_bit_for_bit(stop):
    method = tw.TopK(density=Schedule((0, 2, 4), (1.0, 0.2, 0.05)), dense_fallback=False)
    ours = Cluster(3, method, shapes=SHAPES, deterministic=True)
    for step in range(stop):
        ours.step(ours.random(step))
    theirs = Cluster(3, method, shapes=SHAPES, deterministic=True)
    for rank in range(3):
        ours.reducers[rank].settle()
        theirs.reducers[rank].load_state_dict(ours.reducers[rank].state_dict())
    for step in range(stop, 7):
        left, right = ours.step(ours.random(step)), theirs.step(theirs.random(step))
        assert all(same_bits(left[0][n], right[0][n]) for n in SHAPES)


def test_densities_that_do_not_pay_go_dense_by_plan():
    planner = Planner(
        Cluster(1, tw.Dense(), shapes=SHAPES).infos.values(),
        tw.TopK(density=Schedule((0, 1), (0.5, 0.01))),
        [],
        8,
    )
    assert planner.plan(0)["linear"].dense and not planner.plan(1)["linear"].dense
    assert planner.change(1) is None and planner.change(0) is not None


@pytest.mark.parametrize(
    "build, field",
    [
        (lambda: Schedule((0, 0), (0.1, 0.2)), "starts"),
        (lambda: Schedule((1,), (0.1,)), "starts"),
        (lambda: warmup([], final=0.1, every=1), "densities"),
        (lambda: warmup([0.5], final=0.0, every=1), "density"),
        (lambda: warmup([0.5], final=0.1, every=0), "every"),
        (lambda: exponential_warmup(final=0.5, start=0.1, steps=3), "start"),
        (lambda: exponential_warmup(final=0.01, steps=3, dense=-1), "dense"),
        (lambda: Timeline(phases=((1, tw.Dense()),)), "phases"),
        (lambda: Timeline(phases=((0, "dense"),)), "phases"),
        (lambda: Timeline(phases=5), "phases is 5; it must be pairs of a step and a method"),
        (lambda: Timeline(phases=((0, tw.Dense()), ("later", tw.TopK()))), "phases is .*'later'"),
        (lambda: Timeline(phases=((0, tw.Dense()), (5, tw.Auto()))), "chooses by itself"),
    ],
)
def test_bad_schedules_are_named(build, field):
    with pytest.raises(UsageError, match=field):
        build()


def schedule_job(rank, world):
    ddp = DistributedDataParallel(make_cnn(), bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
    density = warmup([1.0, 0.25], final=0.02, every=3)
    handle = tw.attach(ddp, DGC(density=density), optimizer=optimizer)
    dense = []
    train(
        ddp, optimizer, batches(rank, 8), lambda step: dense.append(handle.plan()["6.weight"].dense)
    )
    assert dense == [True] * 3 + [False] * 5
    state = handle.state_dict()
    left = fingerprint(ddp)
    train(ddp, optimizer, batches(rank, 2, seed=1))
    handle.load_state_dict(state)
    handle.close()
    return left, fingerprint(ddp)


def test_schedule_on_real_ranks(pools):
    prints = pools(3).run(schedule_job)
    assert len(set(prints)) == 1


def test_decay_goes_down_once_per_epoch_and_stops_at_the_floor():
    schedule = tw.decay(0.02, factor=0.5, floor=0.004, every=10)
    assert [schedule.at(step) for step in (0, 9, 10, 25, 30, 10_000)] == [
        0.02,
        0.02,
        0.01,
        0.005,
        0.004,
        0.004,
    ]


@pytest.mark.parametrize(
    "bad", [{"factor": 1.0}, {"factor": 0}, {"floor": 0.5}, {"every": 0}, {"floor": 0}]
)
def test_a_decay_that_cannot_be_is_refused(bad):
    with pytest.raises(tw.UsageError):
        tw.decay(**{"start": 0.02, "factor": 0.9, "floor": 0.001, "every": 10, **bad})
