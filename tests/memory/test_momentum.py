"""Momentum correction against its definition, written per element."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster, same_bits
from thinwire.errors import UsageError
from thinwire.memory.momentum import MomentumCorrection
from thinwire.methods.base import DenseMomentum

SHAPES = {"weight": (24, 40), "bias": (8,)}


def momentum_topk(density=0.05, *, nesterov=False, masking=True, storage="fp32", values="fp32"):
    memory = MomentumCorrection(0.9, nesterov, masking, storage)
    return tw.TopK(density=density, memory=memory, values=values, dense_fallback=False)


def store(cluster, rank, name, which):
    cluster.reducers[rank].settle()
    return cluster.reducers[rank].assignments.held(name, which)


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_three_ranks_follow_the_definition(nesterov, masking):
    cluster = Cluster(3, momentum_topk(nesterov=nesterov, masking=masking), shapes=SHAPES)
    k = 48
    u = [torch.zeros(24, 40) for _ in range(3)]
    v = [torch.zeros(24, 40) for _ in range(3)]
    dense_u = torch.zeros(8)
    for step in range(6):
        gradients = cluster.random(step)
        updates = cluster.step(gradients)
        expected = torch.zeros(24, 40)
        for rank in range(3):
            g = gradients[rank]["weight"]
            u[rank] = 0.9 * u[rank] + g
            v[rank] = v[rank] + (g + 0.9 * u[rank] if nesterov else u[rank])
            chosen = v[rank].abs().view(-1).topk(k).indices
            expected.view(-1)[chosen] += v[rank].view(-1)[chosen]
            v[rank].view(-1)[chosen] = 0
            if masking:
                u[rank].view(-1)[chosen] = 0
        torch.testing.assert_close(updates[0]["weight"], expected / 3)
        mean = sum(g["bias"] for g in gradients) / 3
        dense_u = 0.9 * dense_u + mean
        dense = mean + 0.9 * dense_u if nesterov else dense_u
        torch.testing.assert_close(updates[0]["bias"], dense)
        for rank in range(3):
            assert same_bits(updates[rank]["weight"], updates[0]["weight"])
            assert same_bits(updates[rank]["bias"], updates[0]["bias"])
            torch.testing.assert_close(store(cluster, rank, "weight", "momentum"), u[rank])
            torch.testing.assert_close(store(cluster, rank, "weight", "residual"), v[rank])


def test_bad_step_unmasks_and_gives_everything_back():
    cluster = Cluster(2, momentum_topk(), shapes=SHAPES)
    cluster.step(cluster.random(0))
    u, v = (store(cluster, 0, "weight", which) for which in ("momentum", "residual"))
    dense = store(cluster, 0, "bias", "momentum")
    gradients = cluster.random(1)
    finite = gradients[0]["weight"].clone()
    gradients[1]["weight"][0, 0] = torch.nan
    assert cluster.step(gradients)[0]["bias"].isnan().all()
    new_u = 0.9 * u + finite
    assert same_bits(store(cluster, 0, "weight", "momentum"), new_u)
    assert same_bits(store(cluster, 0, "weight", "residual"), v + new_u)
    assert same_bits(store(cluster, 0, "bias", "momentum"), dense)
    assert store(cluster, 1, "weight", "momentum").isfinite().all()


def test_discarded_step_unmasks_after_it_was_settled():
    cluster = Cluster(1, momentum_topk(), shapes=SHAPES)
    gradients = cluster.random(0)
    cluster.step(gradients)
    assert not same_bits(store(cluster, 0, "weight", "momentum"), gradients[0]["weight"])
    cluster.reducers[0].settle(discard=True)
    assert same_bits(store(cluster, 0, "weight", "momentum"), gradients[0]["weight"])
    assert same_bits(store(cluster, 0, "weight", "residual"), gradients[0]["weight"])
    assert not store(cluster, 0, "bias", "momentum").any()


@pytest.mark.parametrize("storage", ["fp32", "int8"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_turning_dense_averages_u_and_v_and_turning_sparse_keeps_u(nesterov, storage):
    method = momentum_topk(nesterov=nesterov, storage=storage)
    cluster = Cluster(3, method, shapes=SHAPES)
    for step in range(3):
        cluster.step(cluster.random(step))
    u = sum(store(cluster, r, "weight", "momentum") for r in range(3)) / 3
    v = sum(store(cluster, r, "weight", "residual") for r in range(3)) / 3
    cluster.switch(DenseMomentum(momentum=0.9, nesterov=nesterov))
    for step in range(3, 6):
        gradients = cluster.random(step)
        mean = sum(g["weight"] for g in gradients) / 3
        u = 0.9 * u + mean
        expected = v + (mean + 0.9 * u if nesterov else u)
        v = torch.zeros_like(v)
        update = cluster.step(gradients)[1]["weight"]
        torch.testing.assert_close(
            update, expected, rtol=1e-4, atol=1e-5 if storage == "fp32" else 0.05
        )
    held = store(cluster, 0, "weight", "momentum")
    assert all(same_bits(store(cluster, r, "weight", "momentum"), held) for r in range(3))
    assert store(cluster, 0, "weight", "residual") is None
    cluster.switch(method)
    gradients = cluster.random(9)
    cluster.step(gradients)
    cluster.reducers[0].settle(discard=True)
    expected = 0.9 * held + gradients[0]["weight"]
    tolerance = 1e-6 if storage == "fp32" else 0.1
    torch.testing.assert_close(
        store(cluster, 0, "weight", "momentum"), expected, rtol=0, atol=tolerance
    )


def test_velocity_is_conserved_for_every_wire():
    for values in ("fp32", "bf16", "int4"):
        cluster = Cluster(3, momentum_topk(values=values), shapes={"weight": (24, 40)})
        before = [torch.zeros(24, 40) for _ in range(3)]
        u = [torch.zeros(24, 40) for _ in range(3)]
        for step in range(4):
            gradients = cluster.random(step)
            update = cluster.step(gradients)[0]["weight"]
            c = [before[r] + 0.9 * u[r] + gradients[r]["weight"] for r in range(3)]
            before = [store(cluster, r, "weight", "residual") for r in range(3)]
            u = [store(cluster, r, "weight", "momentum") for r in range(3)]
            difference = 3 * update.double() + sum(before).double() - sum(c).double()
            assert difference.abs().sum() <= 1e-6 * sum(c).abs().sum()


def test_momentum_must_come_from_somewhere():
    with pytest.raises(UsageError, match="optimizer"):
        MomentumCorrection().start()
    with pytest.raises(UsageError, match=r"momentum is 0\.5"):
        MomentumCorrection(0.5).with_momentum(0.9, False)
    with pytest.raises(UsageError, match=r"\[0, 1\)"):
        MomentumCorrection(1.0)


@pytest.mark.parametrize("method", [tw.Dense(), tw.TopK(density=0.5, dense_fallback=False)])
def test_a_momentum_that_nobody_takes_over_is_no_gradient(method):
    """Nothing was held back, so nothing of it is sent; the next gradient is all there is."""
    cluster = Cluster(1, DenseMomentum(momentum=0.9), shapes={"w": (4, 4)})
    for _ in range(2):
        cluster.step([{"w": torch.ones(4, 4)}])
    cluster.switch(method)
    (update,) = cluster.step([{"w": torch.full((4, 4), 5.0)}])
    assert set(update["w"].flatten().tolist()) <= {0.0, 5.0}
    assert update["w"].count_nonzero() == (16 if isinstance(method, tw.Dense) else 8)
