"""The kernels of a majority vote, run on the CPU, give the bits of torch."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.kernels.cpu_compiler import needs_compiler
from thinwire.engine.bucket_plan import backends_of

pytestmark = needs_compiler
SHAPES = {"long": (40, 251), "odd": (3, 431), "last": (2, 650)}


def rounded(cluster, count):
    """Many zeros, and ties between ranks."""
    made = cluster.random(count)
    return [{name: g.round() for name, g in one.items()} for one in made]


def compare_scaled(kernels, world, **options):
    """In a step without gradients for one slot, in one with a gradient that is not finite, and in one that is discarded."""
    results = []
    for on in (True, False):
        kernels(on)
        cluster = Cluster(world, tw.SignSGD(memory=tw.memory.Residual()), **options)
        seen = []
        for count in range(5):
            gradients = cluster.random(count)
            for one in gradients:
                one["odd"].mul_(float(count != 1))
            gradients[-1]["long"].view(-1)[7] += torch.inf if count == 2 else 0.0
            seen.append(cluster.step(gradients))
            seen.append([cluster.residuals(rank) for rank in range(world)])
            if count == 3:
                for reducer in cluster.reducers:
                    reducer.settle(discard=True)
                seen.append([cluster.residuals(rank) for rank in range(world)])
        results.append(seen)
    for mine, other in zip(*results, strict=True):
        for rank in range(world):
            for name in other[rank]:
                left, right = mine[rank][name], other[rank][name]
                assert torch.equal(left.nan_to_num(nan=7e7), right.nan_to_num(nan=7e7))


def compare_votes(kernels, abstain, world, **options):
    results = []
    for on in (True, False):
        kernels(on)
        cluster = Cluster(world, tw.SignSGD(abstain=abstain), **options)
        results.append([cluster.step(rounded(cluster, count)) for count in range(3)])
    for mine, other in zip(*results, strict=True):
        for rank in range(world):
            for name in other[rank]:
                assert torch.equal(mine[rank][name], other[rank][name])
                assert torch.equal(mine[rank][name].signbit(), other[rank][name].signbit())


@pytest.mark.parametrize("world", [1, 3])
def test_scaled_signs_are_the_same_with_and_without_kernels(kernels, launched, world):
    compare_scaled(kernels, world, shapes=SHAPES)
    assert "add_signs" in launched


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("abstain", [True, False])
def test_votes_are_the_same_with_and_without_kernels(kernels, launched, abstain, world):
    compare_votes(kernels, abstain, world, shapes=SHAPES)
    assert ("count_votes" in launched) == (world > 1)


@pytest.mark.parametrize(
    ("on", "dtype", "world", "vote", "scaled"),
    [
        (True, torch.float32, 2, "torch, then CUDA kernels", "torch, then CUDA kernels"),
        (True, torch.float32, 1, "torch: there is nobody to vote with", "torch, then CUDA kernels"),
        (False, torch.float32, 2, *["torch: there are no kernels for cpu"] * 2),
        (True, torch.float64, 2, *["torch: the kernels do not write signs of torch.float64"] * 2),
    ],
)
def test_the_plan_tells_who_works_on_signs(kernels, on, dtype, world, vote, scaled):
    kernels(on)
    for method, told in ((tw.SignSGD(), vote), (tw.SignSGD(memory=tw.memory.Residual()), scaled)):
        cluster = Cluster(world, method, shapes=SHAPES, dtype=dtype)
        cluster.step(cluster.random(0))
        assert set(backends_of(cluster.reducers[0].routes).values()) == {told}
