"""Memory in two buffers under the kernels, run on the CPU: the bits of one buffer in good steps, no trace of skipped ones."""

from __future__ import annotations

import math

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.contracts.test_skipped_steps import changes, discard, state_of
from tests.kernels.cpu_compiler import needs_compiler
from tests.kernels.test_fused import adtopk, compare, correction, dgc, momenta
from tests.kernels.test_fused_threshold import method as threshold_method
from tests.kernels.test_launches import launches_per_rank
from tests.lanes import slow
from thinwire.kernels.journal import restore_all
from thinwire.methods.base import DenseMomentum

pytestmark = [needs_compiler, pytest.mark.timeout(300)]
ROWS = {"short": (5, 7), "row": (3, 128), "odd": (4, 131), "wide": (2, 1300), "bias": (6,)}
TENSORS = {"row": (3, 9001), "odd": (5, 1024), "bias": (6,)}
CASES = {
    "streamed rows": (adtopk(0.02), ROWS),
    "rows in registers": (adtopk(0.3), ROWS),
    "rows with momentum": (adtopk(0.05, memory=correction(nesterov=True)), ROWS),
    "long rows in registers with momentum": (adtopk(0.3, memory=correction()), ROWS),
    "columns": (adtopk(0.05, axis=0), {"row": (160, 12), "odd": (131, 9), "bias": (6,)}),
    "columns with momentum": (
        adtopk(0.05, axis=0, memory=correction()),
        {"row": (160, 12), "odd": (131, 9), "bias": (6,)},
    ),
    "whole tensors": (tw.TopK(density=0.01, dense_fallback=False), TENSORS),
    "whole tensors with momentum": (dgc(0.01, nesterov=True), TENSORS),
    "thresholds": (threshold_method(), TENSORS),
    "memory in bf16": (adtopk(0.05, memory=tw.memory.Residual(storage="bf16")), ROWS),
    "memory in int8": (
        adtopk(0.05, memory=tw.memory.MomentumCorrection(0.9, True, storage="int8")),
        ROWS,
    ),
    "dense tensors with momentum": (
        tw.DGC(density=0.05, memory=correction()),
        {"row": (64, 160), "odd": (96, 160), "bias": (64,)},
    ),
    "only dense tensors with momentum": (DenseMomentum(momentum=0.9), ROWS),
    "low rank": (tw.ACPSGD(rank=2, dense_fallback=False), {"row": (30, 128), "odd": (20, 131)}),
    "low rank in two phases": (tw.PowerSGD(rank=12), {"row": (30, 128), "odd": (200, 31)}),
}
each_case = pytest.mark.parametrize("case", CASES)
SKIPPED = (2, 3, 5)


def run(case: str, *, restorable: bool, skipping: bool = False, scaled: bool = False):
    """Seven steps of two ranks; with `skipping` some more in between are bad or discarded. Also their cluster."""
    method, shapes = CASES[case]
    scale = torch.tensor(1024.0)
    cluster = Cluster(
        2, method, shapes=shapes, restorable=restorable, scale=lambda: scale if scaled else None
    )
    seen = []
    for count in range(7):
        if skipping and count in SKIPPED:
            scale.mul_(2.0**count)
            before = state_of(cluster)
            gradients = cluster.random(100 + count, 1e6)
            if count != 3:
                gradients[1]["odd"].view(-1)[77] = math.inf
            cluster.step(gradients)
            if count == 3:
                state_of(cluster)
                discard(cluster)
            assert changes(before, state_of(cluster)) == []
            scale.mul_(2.0**-count)
        updates = cluster.step(cluster.random(count))
        held = [cluster.residuals(rank) for rank in range(2)]
        seen.append((updates, held, momenta(cluster)))
    return seen, cluster


@each_case
def test_two_buffers_give_the_bits_of_one(kernels, case):
    one, _ = run(case, restorable=False)
    two, cluster = run(case, restorable=True)
    assert_same(one, two)
    backends = [
        route.backend for plan in cluster.reducers[0].plans.values() for route in plan.routes
    ]
    assert set(backends) == {"CUDA kernels"}, "the kernels did not run"


@pytest.mark.parametrize(
    ("case", "scaled"),
    [
        (case, scaled) if scaled == bool(number % 2) else slow(case, scaled)
        for number, case in enumerate(CASES)
        for scaled in (False, True)
    ],
)
def test_skipped_steps_leave_no_trace(kernels, case, scaled):
    plain, _ = run(case, restorable=True, scaled=scaled)
    skipping, _ = run(case, restorable=True, skipping=True, scaled=scaled)
    if case in ("thresholds", "low rank", "low rank in two phases"):
        # Whose turn it is depends on counters, which always advance.
        return
    assert_same(plain, skipping)


def assert_same(ours, theirs):
    for mine, others in zip(ours, theirs, strict=True):
        for left, right in zip(mine, others, strict=True):
            for rank in range(2):
                for name, value in left[rank].items():
                    assert torch.equal(value, right[rank][name]), name


@pytest.mark.parametrize("case", ["streamed rows", "whole tensors with momentum", "memory in int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_and_parts_agree_about_skipped_steps(kernels, case, dtype):
    method, shapes = CASES[case]

    def gradients(cluster, count):
        made = cluster.random(count)
        if count == 1:
            made[1]["odd"].view(-1)[70] = math.nan
        if count == 3:
            for by_name in made:
                by_name["row"].zero_()
        return made

    options = {"steps": 5, "discard": (2,), "restorable": True, "dtype": dtype}
    compare(kernels, method, gradients, shapes=shapes, **options)


def test_a_step_that_can_be_skipped_takes_one_launch_more(launched):
    cluster = Cluster(2, adtopk(0.1), shapes=ROWS, restorable=True)
    cluster.buckets = [["short", "row"], ["odd", "wide", "bias"]]
    counts = launches_per_rank(cluster, launched)
    assert counts["give_back_all"] == counts["restore_all"] == 1


def test_tensors_at_odd_places_are_restored_byte_by_byte(kernels):
    now, before = torch.randn(1003), torch.randn(1003)
    codes, old = torch.arange(77, dtype=torch.int8), torch.ones(77, dtype=torch.int8)
    kept = [now.clone(), codes.clone()]
    pairs = [(now[1:], before[1:]), (codes[3:], old[3:])]
    restore_all(pairs, torch.tensor(False))
    assert torch.equal(now, kept[0]) and torch.equal(codes, kept[1])
    restore_all(pairs, torch.tensor(True))
    assert torch.equal(now[1:], before[1:]) and torch.equal(codes[3:], old[3:])
    assert now[0] == kept[0][0] and torch.equal(codes[:3], kept[1][:3])
