"""Narrow storages: idempotent, unbiased, within the stated loss, and the bytes they promise."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster, same_bits
from thinwire.errors import UsageError
from thinwire.memory.residual import Residual
from thinwire.memory.storage import STORAGES

LOSS = {"bf16": 0.0035, "int8": 0.014}
"""Largest relative L2 error of one packing of normal data, as docs/methods.md states it."""
BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 1 / 128}
NARROW = list(LOSS)


def repack(storage, x):
    packing = STORAGES[storage]
    return packing.unpack(packing.pack(x), x.numel())


@pytest.mark.parametrize("storage", NARROW)
def test_packing_what_was_unpacked_changes_nothing(storage):
    for x in (torch.randn(10_001), torch.randn(5), 1e-30 * torch.randn(300), torch.zeros(130)):
        once = repack(storage, x)
        assert same_bits(repack(storage, once), once)


@pytest.mark.parametrize("storage", NARROW)
def test_loss_of_one_packing(storage):
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    error = (repack(storage, x) - x).norm() / x.norm()
    assert 0 < error <= LOSS[storage]
    assert abs((repack(storage, x) - x).mean()) < 1e-4


@pytest.mark.parametrize("storage", NARROW)
def test_extreme_values_stay_finite(storage):
    x = torch.tensor([3.4e38, -3.4e38, 1e-45, -1e-45, 0.0, 1.0])
    assert repack(storage, x).isfinite().all()


@pytest.mark.parametrize("storage", NARROW)
def test_small_gradients_add_up_in_the_mean(storage):
    """Round-to-nearest would lose every one of them: they are below half a step of what is held."""
    generator = torch.Generator().manual_seed(0)
    held = torch.ones(20_000)
    added = torch.zeros(20_000)
    for _ in range(50):
        g = 1e-4 * (1 + torch.rand(20_000, generator=generator))
        added += g
        held = repack(storage, held + g)
    assert abs((held - 1).mean() / added.mean() - 1) < 0.2


@pytest.mark.parametrize("storage", BYTES)
def test_bytes_are_what_the_format_says(storage):
    method = tw.TopK(density=0.01, memory=Residual(storage=storage), dense_fallback=False)
    cluster = Cluster(2, method, shapes={"w": (256, 128), "v": (128, 128)})
    cluster.step(cluster.random(0))
    cluster.pipelines[0].settle()
    held = sum(memory.nbytes() for memory in cluster.pipelines[0].roster.memories())
    assert held == BYTES[storage] * (256 + 128) * 128


@pytest.mark.parametrize("storage", NARROW)
def test_residual_loses_no_more_than_one_packing_per_step(storage):
    method = tw.TopK(density=0.05, memory=Residual(storage=storage), dense_fallback=False)
    cluster = Cluster(3, method, shapes={"w": (40, 50)})
    for step in range(5):
        before = [cluster.residuals(r)["w"] for r in range(3)]
        gradients = cluster.random(step)
        if step == 3:
            gradients[0]["w"][0, 0] = torch.inf
        update = cluster.step(gradients)[0]["w"]
        after = [cluster.residuals(r)["w"] for r in range(3)]
        if step == 3:
            gradients[0]["w"][0, 0] = 0
            update = torch.zeros_like(update)
        c = [before[r] + gradients[r]["w"] for r in range(3)]
        lost = 3 * update + sum(after) - sum(c)
        packings = 2 if step == 3 else 1
        assert lost.norm() <= packings * 1.3 * LOSS[storage] * torch.stack(c).norm()


@pytest.mark.parametrize("storage", NARROW)
def test_state_survives_rebucketing_and_a_round_trip(storage):
    method = tw.TopK(density=0.05, memory=Residual(storage=storage), dense_fallback=False)
    cluster = Cluster(2, method)
    cluster.step(cluster.random(0))
    held = cluster.residuals(0)
    cluster.buckets = [["head", "scalar"], ["linear"], ["bias", "conv"]]
    cluster.step([{n: torch.zeros_like(g) for n, g in rank.items()} for rank in cluster.random(1)])
    assert all(same_bits(cluster.residuals(0)[n], held[n]) for n in held)
    other = Cluster(2, method)
    for rank in range(2):
        other.pipelines[rank].load_state_dict(cluster.pipelines[rank].state_dict())
    for step in range(2, 5):
        ours, theirs = cluster.step(cluster.random(step)), other.step(other.random(step))
        assert all(same_bits(ours[0][n], theirs[0][n]) for n in held)


def test_flush_of_a_packed_residual_waits_and_then_sends_everything():
    method = tw.TopK(density=0.05, memory=Residual(storage="int8"), dense_fallback=False)
    cluster = Cluster(2, method)
    cluster.step(cluster.random(0))
    held = [cluster.residuals(rank)["linear"] for rank in range(2)]
    cluster.switch(tw.Dense())
    gradients = cluster.random(1)
    for rank in range(2):
        gradients[rank]["linear"].zero_()
    assert not cluster.step(gradients)[0]["linear"].any()
    assert same_bits(cluster.residuals(0)["linear"], held[0])
    gradients = cluster.random(2)
    sent = cluster.step(gradients)[0]["linear"]
    torch.testing.assert_close(sent, sum(held[r] + gradients[r]["linear"] for r in range(2)) / 2)
    assert not cluster.residuals(0)["linear"].any()


def test_loss_scale_moves_packed_residuals_exactly():
    scale = [torch.tensor(1024.0)]
    method = tw.TopK(density=0.05, memory=Residual(storage="int8"), dense_fallback=False)
    cluster = Cluster(1, method, shapes={"w": (40, 50)}, scale=lambda: scale[0])
    cluster.step(cluster.random(0, factor=1024.0))
    held = cluster.residuals(0)["w"]
    scale[0] = torch.tensor(256.0)
    cluster.step([{"w": torch.zeros(40, 50)}])
    assert same_bits(cluster.residuals(0)["w"], held)


def test_unknown_storage_is_refused():
    with pytest.raises(UsageError, match="storage"):
        Residual(storage="int4")
