"""The kernels of a reused threshold, run on the CPU, give the bits of the parts they stand for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster, kernels_of
from tests.kernels import test_fused
from tests.kernels.cpu_compiler import needs_compiler
from thinwire.kernels.cuda.fused_threshold import FusedThreshold, SlotGoal
from thinwire.kernels.cuda.structs import read_column

pytestmark = [needs_compiler, pytest.mark.timeout(300)]

# Two chunks, an odd number of elements, and a slot that is not aligned behind it.
SHAPES = {"long": (40, 251), "odd": (3, 131), "last": (2, 150)}


def method(density=0.05, *, warmup=1, tau=2, floor=2, **options):
    """Every second step is global: turn 0 exact, and then every `tau` turns unless something happens."""
    return tw.ADTopK(
        density=density,
        dense_fallback=False,
        interleave=2,
        threshold=True,
        monitor=tw.select.Monitor(warmup=warmup),
        updater=tw.select.Updater(tau=tau, floor=floor),
        **options,
    )


def compare(kernels, method, gradients_of, *, steps=12, **options):
    """As for exact top-k; what the sessions learned and the tallies counted agrees too."""
    options.setdefault("shapes", SHAPES)
    clusters = test_fused.compare(kernels, method, gradients_of, steps=steps, **options)
    for ours, theirs in zip(clusters[0].reducers, clusters[1].reducers, strict=True):
        learned, known = (p.state_dict()["selection"] for p in (ours, theirs))
        assert learned == known
        assert ours.tally.stats(1, 0) == theirs.tally.stats(1, 0)
    return clusters


def random(cluster, count):
    return cluster.random(count)


def kinds_of(cluster):
    """Which turns the kernels have taken, over all slots."""
    made = [k for k in kernels_of(cluster) if isinstance(k, FusedThreshold)]
    return {bool(exact) for k in made for exact in read_column(SlotGoal, k.goals, "exact")}


def test_exact_and_reused_turns_side_by_side(kernels):
    ours, _ = compare(kernels, method(), random)
    assert kinds_of(ours) == {True, False}


@pytest.mark.parametrize("world", [1, 3])
def test_worlds(kernels, world):
    compare(kernels, method(indices="int32"), random, steps=6, world=world)
    compare(kernels, method(indices="packed"), random, steps=6, world=world)


@pytest.mark.parametrize("values", ["fp32", "fp16"])
def test_value_codes(kernels, values):
    compare(kernels, method(values=values), random, steps=6)


@pytest.mark.parametrize("density", [0.0001, 1.0])
def test_densities(kernels, density):
    compare(kernels, method(density), random, steps=6)


def changed(change, at=(3, 5)):
    """Random gradients, those of the global steps `at` changed: steps 3 and 5 are turns 1 and 2."""

    def gradients(cluster, count):
        made = cluster.random(count)
        if count in at:
            for rank, by_name in enumerate(made):
                for name in by_name:
                    by_name[name] = change(by_name[name], rank)
        return made

    return gradients


@pytest.mark.parametrize("room", [1024, 0])
def test_more_survivors_than_places(kernels, room):
    """Without room to spare the list overflows too."""
    kernels.tune(spare_candidates=room)
    compare(kernels, method(0.02, tau=9), changed(lambda g, _: -100 * g, at=(3,)), steps=6)


def test_nothing_survives(kernels):
    def gradients(cluster, count):
        factor = 1.0 if count < 3 else 0.0
        made = cluster.random(count)
        return [{n: g * factor if n != "odd" else g for n, g in one.items()} for one in made]

    compare(kernels, method(0.5, tau=9), gradients, steps=8)


@pytest.mark.parametrize("room", [1024, 0])
def test_ties_at_the_threshold(kernels, room):
    kernels.tune(spare_candidates=room)
    coarse = changed(lambda g, _: g.round(), at=range(12))
    compare(kernels, method(0.02), coarse, steps=6)


@pytest.mark.parametrize("kind", ["zeros", "constant", "tiny", "huge"])
def test_adversarial_values(kernels, kind):
    kernels.tune(spare_candidates=0)
    changes = {
        "zeros": lambda g, _: torch.where(g > 3.0, g, 0.0),
        "constant": lambda g, _: torch.full_like(g, -0.25),
        "tiny": lambda g, _: g * 1e-41,
        "huge": lambda g, _: g * 1e37,
    }
    compare(kernels, method(values="fp16"), changed(changes[kind], at=range(12)), steps=6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_gradient_on_one_rank(kernels, value):
    def spoil(g, rank):
        if rank == 1:
            g.view(-1)[3] = value
        return g

    compare(kernels, method(tau=9), changed(spoil, at=(1, 3)), steps=6)


def compare_overflows(kernels, method):
    """Gradient and memory overflow together in all of a slot, once it is used and once no rank has a gradient for another."""

    def gradients(cluster, count):
        made = cluster.random(count)
        for by_name in made:
            if count < 5:
                by_name["odd"].fill_(2.5e38)
            if count == 3:
                by_name["last"].zero_()
        return made

    for cluster in compare(kernels, method, gradients, steps=7):
        for rank in range(cluster.world):
            assert all(bool(held.isfinite().all()) for held in cluster.residuals(rank).values())


@pytest.mark.parametrize("threshold", [method(tau=9), tw.Threshold(density=0.05, threshold=1.0)])
def test_memory_that_overflows_in_more_places_than_are_sent(kernels, threshold):
    compare_overflows(kernels, replace(threshold, dense_fallback=False))


def test_slots_without_a_gradient(kernels):
    def gradients(cluster, count):
        made = cluster.random(count)
        for rank, by_name in enumerate(made):
            if count in (1, 3) or rank == 0:
                by_name["odd"].zero_()
        return made

    compare(kernels, method(tau=9), gradients, steps=6)


def test_narrow_gradients(kernels):
    compare(kernels, method(), random, steps=6, dtype=torch.bfloat16)


@pytest.mark.parametrize("limit", [1e-3, 99.0])
def test_a_threshold_of_the_user(kernels, limit):
    fixed = tw.Threshold(density=0.05, threshold=limit, dense_fallback=False)
    compare(kernels, fixed, random, steps=3)


def test_everything_by_a_threshold_of_the_user(kernels):
    compare(kernels, tw.Threshold(density=1.0, dense_fallback=False), random, steps=2)


def test_changing_scale(kernels):
    current = torch.tensor(1024.0)

    def scaled(cluster, count):
        current.fill_([1024.0, 2048.0, 512.0][count % 3])
        return cluster.random(count)

    compare(kernels, method(), scaled, steps=6, scale=lambda: current)


def test_discarded_steps_give_everything_back(kernels):
    compare(kernels, method(tau=9), random, steps=6, discard=(1, 3, 5))


def test_a_resumed_run_goes_on_alike(kernels):
    """Thresholds move between kernels and parts by the state of the session."""
    ours = Cluster(2, method(tau=9), shapes=SHAPES)
    for count in range(5):
        ours.step(ours.random(count))
    kernels(False)
    theirs = Cluster(2, method(tau=9), shapes=SHAPES)
    for mine, other in zip(ours.reducers, theirs.reducers, strict=True):
        other.load_state_dict(mine.state_dict())
    for count in range(5, 8):
        kernels(True)
        update = ours.step(ours.random(count))
        kernels(False)
        again = theirs.step(theirs.random(count))
        for name in SHAPES:
            assert torch.equal(update[0][name], again[0][name])


def test_another_bucketing_keeps_the_thresholds(kernels):
    clusters = []
    for on in (True, False):
        kernels(on)
        clusters.append(Cluster(2, method(tau=9), shapes=SHAPES))
        for count in range(8):
            if count == 4:
                clusters[-1].buckets = [["last", "long"], ["odd"]]
            clusters[-1].step(clusters[-1].random(count))
    ours, theirs = (c.reducers[0].state_dict()["selection"] for c in clusters)
    assert ours == theirs


def test_interleaved_with_exact_top_k(kernels):
    turns = tw.ADTopK(density=0.05, dense_fallback=False, interleave=2)
    compare(kernels, turns, random, steps=4)


def test_the_last_quarter(kernels):
    """Slots whose threshold is stable are all-dimension in global turns too: mixed turns go by the parts."""
    compare(kernels, method(total_steps=8), random, steps=9)
