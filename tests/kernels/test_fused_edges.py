"""The fused kernels, run on the CPU, where steps break off, buckets share a collective and tables reach their ends."""

from __future__ import annotations

import math

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster, kernels_of
from tests.contracts.test_broken_steps import NO_PAPER, end, hand_in
from tests.kernels.cpu_compiler import needs_compiler
from tests.kernels.test_fused import adtopk
from thinwire.errors import ExchangeError
from thinwire.kernels.cuda.bucket import Poison, find_non_finite
from thinwire.kernels.cuda.launch import Arguments, fitting
from thinwire.kernels.cuda.tables import index_places
from thinwire.layout import BucketLayout

pytestmark = [needs_compiler, pytest.mark.timeout(300)]
SHAPES = {"a": (40, 128), "bias a": (3,), "b": (60, 40), "bias b": (5,), "c": (2, 1300)}
DENSE = [tw.rule("bias *", method=tw.Dense())]


def test_what_the_kernels_sent_returns_if_another_group_cannot_be_opened(kernels):
    cluster = Cluster(2, adtopk(), shapes=SHAPES, policy=[tw.rule("b", method=NO_PAPER), *DENSE])
    gradients = cluster.random(0)
    hand_in(cluster, ["b", "a", "c"], gradients)
    assert kernels_of(cluster)
    for rank in range(2):
        held = cluster.residuals(rank)
        for name in ("a", "c"):
            assert torch.equal(held[name], gradients[rank][name])


@pytest.mark.parametrize(("world", "indices"), [(2, "int32"), (5, "packed")])
def test_buckets_with_dense_tensors_of_odd_sizes_share_a_collective(kernels, world, indices):
    method = adtopk(0.1, indices=indices)
    buckets = [["a", "bias a"], ["b", "bias b"], ["c"]]
    results = []
    for worth in (0, 1 << 30):
        cluster = Cluster(world, method, shapes=SHAPES, policy=DENSE)
        for reducer in cluster.reducers:
            reducer.coalesce_bytes = worth
        steps = []
        for count in range(3):
            gradients = cluster.random(count)
            if count == 1:
                gradients[1]["bias b"][2] = math.nan
            futures = [hand_in(cluster, names, gradients) for names in buckets]
            end(cluster)
            flats = [[future.value() for future in bucket] for bucket in futures]
            held = [cluster.residuals(rank) for rank in range(world)]
            steps.append((flats, held))
        results.append(steps)
    for (apart, held), (together, other_held) in zip(*results, strict=True):
        for mine, other in zip(apart, together, strict=True):
            for left, right in zip(mine, other, strict=True):
                assert torch.equal(left.nan_to_num(nan=7e7), right.nan_to_num(nan=7e7))
        for mine, other in zip(held, other_held, strict=True):
            assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_a_bucket_larger_than_a_kernel_counts_is_looked_at_in_parts(kernels):
    kernels.tune(launch_elements=100)
    flat = torch.ones(950)
    assert not find_non_finite(flat)
    flat[940] = math.inf
    assert find_non_finite(flat)
    poison = Poison(BucketLayout((), flat.numel(), flat.dtype, flat.device))
    poison(flat, torch.tensor(False))
    assert flat[:940].isfinite().all()
    poison(flat, torch.tensor(True))
    assert flat.isnan().all()


def test_a_number_that_a_kernel_cannot_hold_is_refused():
    Arguments([(1 << 31) - 1, -(1 << 31)])
    with pytest.raises(ExchangeError, match="counts with 32 bits"):
        Arguments([1 << 31])
    with pytest.raises(ExchangeError, match="counts with 32 bits"):
        fitting(3 << 30)


@pytest.mark.parametrize("shapes", [{"ones": (32, 1)}, {"rows": (4, 64), "ones": (16, 1)}])
def test_indices_without_width_are_read_inside_the_payload(kernels, shapes):
    cluster = Cluster(2, adtopk(1.0, indices="packed"), shapes=shapes)
    cluster.step(cluster.random(0))
    for made in kernels_of(cluster):
        for bit, _ in index_places(made.codec):
            assert bit // 32 * 4 + 4 <= made.codec.nbytes
