"""Dense tensors under momentum correction, by the kernels run on the CPU: the bits of the parts, in as few launches as without."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.kernels.cpu_compiler import needs_compiler
from tests.kernels.test_fused import (
    compare,
    correction,
    find_carriers,
    momenta,
    random,
    spoiled,
)
from tests.kernels.test_launches import launches_per_rank
from tests.lanes import slow
from thinwire.kernels.cuda.fused_topk import MOST_RECORDS as MOST_PAYLOADS
from thinwire.kernels.cuda.restore import MOST_RECORDS as MOST_MOMENTA
from thinwire.layout import Bucket
from thinwire.methods.base import DenseMomentum

pytestmark = [needs_compiler, pytest.mark.timeout(300)]
SMALL = {"large": (64, 160), "bias": (64,), "scalar": (), "norm": (7,), "other": (96, 160)}
SUMMED = {"large": (64, 160), "bias": (9000,), "norm": (7,), "edge": (1025,)}
ALONE = [["large", "other"], ["bias", "scalar", "norm"]]


def dgc(density=0.05, *, nesterov=False, masking=True):
    return tw.DGC(density=density, memory=correction(nesterov, masking))


def overflowing(cluster, count):
    """Finite means whose momentum is not."""
    gradients = cluster.random(count)
    if count < 3:
        for by_name in gradients:
            by_name["bias"][5] = 2.5e38
    return gradients


@pytest.mark.parametrize(
    ("gradients_of", "nesterov"),
    [
        *((random, False), (spoiled, True), (overflowing, False)),
        *(slow(random, True), slow(spoiled, False), slow(overflowing, True)),
    ],
)
def test_small_dense_tensors_beside_the_payload(kernels, gradients_of, nesterov):
    method = dgc(nesterov=nesterov)
    options = {"shapes": SMALL, "steps": 5, "discard": (3,)}
    fast, _ = compare(kernels, method, gradients_of, world=3, **options)
    assert [carrier.summed for carrier in find_carriers(fast)] == [False]
    for held in momenta(fast):
        assert all(bool(u.isfinite().all()) and bool(u.any()) for u in held.values())
    compare(kernels, method, gradients_of, world=2, **options)


@pytest.mark.parametrize("gradients_of", [random, spoiled, overflowing])
def test_larger_dense_tensors_are_summed(kernels, gradients_of):
    options = {"shapes": SUMMED, "steps": 4, "discard": (2,)}
    fast, _ = compare(kernels, dgc(nesterov=True), gradients_of, world=3, **options)
    assert [carrier.summed for carrier in find_carriers(fast)] == [True]


@pytest.mark.parametrize("shapes", [SMALL, SUMMED])
def test_one_rank_and_sums_in_rank_order(kernels, shapes):
    compare(kernels, dgc(), random, shapes=shapes, world=1, discard=(1,))
    compare(kernels, dgc(), spoiled, shapes=shapes, world=3, deterministic=True, discard=(2,))


@pytest.mark.parametrize("gradients_of", [random, spoiled, overflowing])
def test_a_bucket_of_dense_tensors_alone(kernels, gradients_of):
    options = {"shapes": SMALL, "buckets": ALONE, "steps": 4, "discard": (3,)}
    compare(kernels, dgc(nesterov=True), gradients_of, world=3, **options)


@pytest.mark.parametrize("shapes", [SMALL, SUMMED])
def test_a_changing_scale(kernels, shapes):
    current = torch.tensor(1024.0)

    def scaled(cluster, count):
        current.fill_([1024.0, 3000.0, 500.0, 500.0, 7.0][count])
        return spoiled(cluster, count)

    options = {"shapes": shapes, "scale": lambda: current, "steps": 5, "discard": (2,)}
    compare(kernels, dgc(nesterov=True), scaled, world=3, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients(kernels, dtype):
    compare(kernels, dgc(), random, shapes=SMALL, world=3, dtype=dtype, discard=(1,))


@pytest.mark.parametrize("scaled", [False, True])
def test_momentum_stays_if_an_exchange_breaks_off(kernels, scaled):
    """Some buckets have come to their end, others not: all of them return."""
    current = torch.tensor(8.0)
    cluster = Cluster(2, dgc(), shapes=SMALL, scale=lambda: current if scaled else None)
    cluster.buckets = [["large", "bias"], ["other", "norm", "scalar"]]
    cluster.step(cluster.random(0))
    before = momenta(cluster)
    current.fill_(64.0)
    whole = cluster.buckets
    cluster.buckets = whole[:1]
    cluster.step(cluster.random(1))
    for rank, reducer in enumerate(cluster.reducers):
        (layout,) = [each for each in reducer.plans if len(each.slots) == 3]
        reducer.reduce(Bucket(layout, torch.ones(layout.numel)))
        cluster.ranks.drivers[rank].pending.pop()
        reducer.settle()
    after = momenta(cluster)
    for rank in range(2):
        for name in ("bias", "norm", "scalar"):
            assert before[rank][name].any()
            assert torch.equal(after[rank][name], before[rank][name]), name


def test_phases(kernels):
    """Dense with momentum, then compressed, then dense: u goes along."""
    results = []
    for on in (True, False):
        kernels(on)
        cluster = Cluster(3, dgc(nesterov=True), shapes=SMALL)
        dense = DenseMomentum(momentum=0.9, nesterov=True)
        seen = []
        for count, method in enumerate((dense, dense, dgc(nesterov=True), dgc(0.1), dense, dense)):
            cluster.switch(method)
            seen.append((cluster.step(cluster.random(count)), momenta(cluster)))
        results.append(seen)
    for ours, theirs in zip(*results, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            for left, right in zip(mine, other, strict=True):
                for name in SMALL:
                    assert torch.equal(left[name], right[name])


def test_launches_of_a_step(launched):
    cluster = Cluster(2, dgc(), shapes=SMALL)
    cluster.buckets = [["large", "bias"], ["other", "norm", "scalar"]]
    assert launches_per_rank(cluster, launched) == {
        "open_payload": 2,
        "multi_block_collect": 2,
        "multi_block_decide": 2,
        "multi_block_send": 2,
        "decode": 2,
        "dense_momentum": 2,
        "poison": 2,
        "give_back_all": 1,
        "restore_all": 1,
    }


def test_more_buckets_than_one_launch_takes_back(launched):
    names = [f"w{number}" for number in range(MOST_PAYLOADS + 3)]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, (2, 24))
    shapes |= {f"bias {number}": (3,) for number in range(MOST_MOMENTA + 2)}
    rules = [tw.rule("bias *", method=DenseMomentum(momentum=0.9))]
    method = tw.DGC(density=0.1, memory=correction(), dense_fallback=False, values="fp32")
    cluster = Cluster(2, method, shapes=shapes, policy=rules)
    cluster.buckets = [[name] for name in shapes]
    first = cluster.random(0)
    cluster.step(first)
    before = momenta(cluster)
    held, _ = (cluster.residuals(rank) for rank in range(2))
    launched.clear()
    cluster.step(cluster.random(1))
    for reducer in cluster.reducers:
        reducer.settle(discard=True)
    assert launched.count("give_back_all") == launched.count("restore_all") == 2 * 2
    after = momenta(cluster)
    for name in shapes:
        if name.startswith("bias"):
            assert torch.equal(after[0][name], before[0][name])
    now = cluster.residuals(0)
    second = cluster.random(1)
    for name in names:
        u = 0.9 * before[0][name] + second[0][name]
        assert torch.allclose(after[0][name], u) and torch.allclose(now[name], held[name] + u)
