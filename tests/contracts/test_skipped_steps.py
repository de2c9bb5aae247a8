"""Contract 3: a step that is skipped leaves no trace, on any rank, in anything that outlives a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.contracts.cluster import Cluster, sparse
from thinwire.engine.loss_scale import WIDEST_SCALE
from thinwire.methods.base import DenseMomentum, Method

WORLD = 3
TWO_BUCKETS = [["head", "scalar", "linear"], ["bias", "conv"]]


def corrected(storage: str = "fp32", **options: Any) -> tw.DGC:
    memory = tw.memory.MomentumCorrection(0.9, nesterov=False, storage=storage)
    return tw.DGC(density=0.05, memory=memory, dense_fallback=False, **options)


NEVER_DENSE = {"density": 0.05, "dense_fallback": False}
METHODS: dict[str, Method] = {
    "ADTopK": sparse("bf16"),
    "ADTopK, 8 bits": sparse("int8"),
    "ADTopK, memory in bf16": sparse(memory=tw.memory.Residual(storage="bf16")),
    "ADTopK, memory in int8": sparse(memory=tw.memory.Residual(storage="int8")),
    "ADTopK, weighted memory": sparse(memory=tw.memory.Residual(beta=0.9, gamma=1.5)),
    "ADTopK, no memory": sparse(memory=tw.memory.NoMemory()),
    "TopK": tw.TopK(**NEVER_DENSE),
    "RandomK": tw.RandomK(**NEVER_DENSE),
    "DGC": corrected(),
    "DGC, memory in int8": corrected("int8"),
    "DGC, sampled": corrected(sample_ratio=0.1),
    "OkTopK": tw.OkTopK(**NEVER_DENSE),
    "OkTopK, published": tw.OkTopK(thresholds="published", **NEVER_DENSE),
    "GTopK": tw.GTopK(**NEVER_DENSE),
    "ExclusiveTopK": tw.ExclusiveTopK(**NEVER_DENSE),
    "TopKDSA": tw.TopKDSA(**NEVER_DENSE),
    "Threshold": tw.Threshold(threshold=0.5, density=0.2, dense_fallback=False),
    "SIDCo, adapting": tw.SIDCo(adapt=True, **NEVER_DENSE),
    "reused thresholds": tw.Compose(
        select=tw.select.ThresholdTopK(0.05, tw.select.Monitor(warmup=2)), dense_fallback=False
    ),
    "PowerSGD": tw.PowerSGD(rank=2, dense_fallback=False),
    "PowerSGD, renewing": tw.PowerSGD(rank=2, dense_fallback=False, subspace_refresh_every=2),
    "ACPSGD": tw.ACPSGD(rank=2, dense_fallback=False),
    "ACPSGD, bf16": tw.ACPSGD(rank=2, dense_fallback=False, wire="bf16"),
    "SignSGD": tw.SignSGD(memory=tw.memory.Residual()),
    "Quantized": tw.Quantized(block=32, dense_fallback=False),
    "Quantized, 1 bit": tw.Quantized(bits=1, block=32, dense_fallback=False),
    "Quantized, stochastic, memory in int8": tw.Quantized(
        bits=4,
        block=32,
        rounding="stochastic",
        memory=tw.memory.Residual(storage="int8"),
        dense_fallback=False,
    ),
    "Quantized, no memory": tw.Quantized(
        block=32, memory=tw.memory.NoMemory(), dense_fallback=False
    ),
    "dense with momentum": DenseMomentum(momentum=0.9),
}


def state_of(cluster: Cluster) -> list[dict[str, Any]]:
    """All that outlives a step but counters, of every rank."""
    states = []
    for reducer in cluster.reducers:
        reducer.settle()
        states.append(reducer.state_dict())
    return states


def tensors(state: Any, at: str = "") -> dict[str, Any]:
    """The leaves of a state by path."""
    if not isinstance(state, dict):
        return {at: state}
    return {
        path: leaf
        for key, value in state.items()
        for path, leaf in tensors(value, f"{at}/{key}").items()
    }


COUNTERS = ("step", "turn", "due", "tau", "stable")


def changes(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    """What differs in any bit, host counters aside."""
    found = []
    for left, right in zip(map(tensors, before), map(tensors, after), strict=True):
        assert left.keys() == right.keys()
        for path, value in left.items():
            if path.startswith("/steps/") or path.split("/")[-1] in COUNTERS:
                continue
            same = (
                torch.equal(value, right[path])
                if isinstance(value, Tensor)
                else value == right[path] or value != value
            )
            found += [] if same else [path]
    return found


def with_inf(cluster: Cluster, gradients: list[dict[str, Tensor]]) -> None:
    gradients[1]["linear"][4, 5] = math.inf


def with_overflow(cluster: Cluster, gradients: list[dict[str, Tensor]]) -> None:
    for one in gradients:
        one["linear"][4, 5] = one["conv"][1, 0, 0, 0] = 3e38


def by_hand(cluster: Cluster, gradients: list[dict[str, Tensor]]) -> None:
    for name in gradients[2]:
        gradients[2][name] *= 1000


def discard(cluster: Cluster) -> None:
    for reducer in cluster.reducers:
        reducer.settle(discard=True)


@pytest.mark.parametrize("spoil", [with_inf, with_overflow, by_hand])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_skipped_step_leaves_no_trace(method: Method, spoil: Callable[..., None]):
    cluster = Cluster(WORLD, method, restorable=True)
    cluster.buckets = TWO_BUCKETS
    for seed in range(3):
        cluster.step(cluster.random(seed))
    before = state_of(cluster)
    for seed in (10, 11):
        gradients = cluster.random(seed, 1e6 if spoil is with_inf else 1.0)
        spoil(cluster, gradients)
        cluster.step(gradients)
        if seed == 11:
            state_of(cluster)  # somebody looks before it is discarded
        if not cluster.reducers[0].verdict():
            # As the user's own rule would: an update of 1e38 is finite.
            discard(cluster)
        assert changes(before, state_of(cluster)) == []
    for seed in range(3, 5):
        updates = cluster.step(cluster.random(seed))
        assert all(u.isfinite().all() for one in updates for u in one.values())


@pytest.mark.parametrize(
    "name", ["ADTopK", "DGC", "ADTopK, memory in int8", "ACPSGD", "dense with momentum"]
)
@pytest.mark.parametrize("scales", [(1024.0, 4096.0, 2.0), (2.0**40, 2.0**-40, 2.0**20)])
def test_memory_is_restored_in_unscaled_units_whatever_the_scale_does(name: str, scales):
    scale = torch.tensor(scales[0])
    cluster = Cluster(2, METHODS[name], scale=lambda: scale, restorable=True)
    cluster.step(cluster.random(0, scales[0]))
    before = state_of(cluster)
    for seed, value in enumerate(scales):
        scale.fill_(value)
        gradients = cluster.random(seed + 1, value)
        gradients[1]["linear"][4, 5] = math.inf
        cluster.step(gradients)
        assert changes(before, state_of(cluster)) == []


@pytest.mark.parametrize(
    "name", ["ADTopK", "DGC", "PowerSGD", "SignSGD", "Quantized", "dense with momentum"]
)
@pytest.mark.parametrize("value", [1e-42, 0.0, math.inf, math.nan, 2 * WIDEST_SCALE])
@pytest.mark.parametrize("restorable", [True, False])
def test_a_senseless_loss_scale_costs_its_own_step(name: str, value: float, restorable: bool):
    scale = torch.tensor(1024.0)
    cluster = Cluster(2, METHODS[name], scale=lambda: scale, restorable=restorable)
    cluster.step(cluster.random(0, 1024.0))
    before = state_of(cluster)
    scale.fill_(value)
    for update in cluster.step(cluster.random(1, 1e-3)):
        assert all(one.isnan().all() for one in update.values())
    if restorable:
        assert changes(before, state_of(cluster)) == []
    scale.fill_(512.0)
    for update in cluster.step(cluster.random(2, 512.0)):
        assert all(one.isfinite().all() for one in update.values())
    for path, leaf in tensors(state_of(cluster)[0]).items():
        assert not isinstance(leaf, Tensor) or leaf.isfinite().all(), path


def test_the_first_step_of_all_can_be_skipped():
    cluster = Cluster(WORLD, sparse(), restorable=True)
    cluster.step(cluster.random(0, 1000.0))
    discard(cluster)
    assert not any(held.any() for rank in range(WORLD) for held in cluster.residuals(rank).values())


@pytest.mark.parametrize("name", ["ADTopK", "DGC", "ADTopK, memory in int8", "ACPSGD", "Quantized"])
def test_a_flush_that_is_skipped_is_repeated_from_what_was_held(name: str):
    cluster = Cluster(2, METHODS[name], restorable=True)
    cluster.step(cluster.random(0))
    cluster.switch(DenseMomentum(momentum=0.9) if name == "DGC" else tw.Dense())
    before = state_of(cluster)
    for seed in (1, 2):
        gradients = cluster.random(seed)
        by_hand(cluster, gradients[:1] * 3)
        cluster.step(gradients)
        if seed == 2:
            state_of(cluster)
        discard(cluster)
        assert changes(before, state_of(cluster)) == []
    held = sum(cluster.residuals(rank)["linear"] for rank in range(2))
    gradients = cluster.random(3)
    update = cluster.step(gradients)[0]["linear"]
    if name != "DGC":
        total = held + sum(one["linear"] for one in gradients)
        torch.testing.assert_close(2 * update, total)
    assert not any(one.any() for one in cluster.residuals(0).values())


def test_thousands_of_skips_cost_as_many_steps_and_nothing_after_them():
    """The same steps with and without a skipped one behind each of them end in the same bits."""
    plain = Cluster(2, sparse("bf16"), restorable=True)
    skipping = Cluster(2, sparse("bf16"), restorable=True)
    for seed in range(50):
        gradients = plain.random(seed)
        left, right = plain.step(gradients), skipping.step(gradients)
        assert all(torch.equal(left[0][name], right[0][name]) for name in left[0])
        bad = skipping.random(1000 + seed, 1e6)
        if seed % 2:
            bad[seed % 4 // 2]["linear"][0, 0] = math.nan
        skipping.step(bad)
        if not seed % 2:
            discard(skipping)
    assert changes(state_of(plain), state_of(skipping)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ADTopK", "TopK", "DGC", "OkTopK", "ACPSGD"])
def test_a_thousand_skips_leave_no_trace(name: str):
    cluster = Cluster(2, METHODS[name], restorable=True)
    for seed in range(3):
        cluster.step(cluster.random(seed))
    before = state_of(cluster)
    for seed in range(1000):
        bad = cluster.random(seed, 1000.0)
        bad[seed % 2]["linear"][4, 5] = (math.inf, 3e38, 1e6, math.nan)[seed % 4]
        cluster.step(bad)
        discard(cluster)
    # Which factor is on the wire depends on the number of steps, and both are what they were.
    assert changes(before, state_of(cluster)) == []
    for update in cluster.step(cluster.random(7)):
        assert all(one.isfinite().all() for one in update.values())


def test_a_parameter_without_a_gradient_keeps_what_it_holds_when_a_step_is_good():
    cluster = Cluster(2, sparse(), restorable=True)
    cluster.step(cluster.random(0))
    before = cluster.residuals(0)["conv"]
    gradients = cluster.random(1)
    for one in gradients:
        one["conv"].zero_()
    assert not cluster.step(gradients)[0]["conv"].any()
    assert torch.equal(cluster.residuals(0)["conv"], before)
