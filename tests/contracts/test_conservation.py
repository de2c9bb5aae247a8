"""Contract 2: nothing is lost."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster, same_bits, sparse

METHODS = {
    "adtopk": lambda values: sparse(values),
    "topk": lambda values: tw.TopK(density=0.05, values=values, dense_fallback=False),
}
LOW_RANK = {
    "powersgd": lambda wire: tw.PowerSGD(rank=2, wire=wire, dense_fallback=False),
    "acpsgd": lambda wire: tw.ACPSGD(rank=2, wire=wire, dense_fallback=False),
}
QUANTIZED = {
    f"quantized {bits}": partial(tw.Quantized, bits=bits, block=32, dense_fallback=False)
    for bits in (16, 8, 4, 2, 1, "fp8")
}
REBUCKETED = [["head", "scalar"], ["linear"], ["bias", "conv"]]


@pytest.mark.parametrize("values", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_accepted_plus_residual_is_c_bit_for_bit_on_every_rank(name, values, dtype):
    cluster = Cluster(3, METHODS[name](values), dtype=dtype)
    for seed in range(5):
        if seed == 2:
            cluster.buckets = REBUCKETED
        before = [cluster.residuals(rank) for rank in range(3)]
        gradients = cluster.random(seed)
        cluster.step(gradients)
        for rank in range(3):
            accepted = cluster.accepted(rank)
            after = cluster.residuals(rank)
            assert set(accepted) == {"conv", "linear", "head"}
            for slot in accepted:
                c = before[rank][slot] + gradients[rank][slot]
                assert same_bits(accepted[slot] + after[slot], c)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("name", [*METHODS, *LOW_RANK, *QUANTIZED])
def test_updates_and_residuals_of_all_ranks_add_up_to_c(name, dtype, world):
    """A bf16 or fp16 gradient rounds the update; every rank banks that rounding."""
    known = {**METHODS, **LOW_RANK}
    method = QUANTIZED[name]() if name in QUANTIZED else known[name]("bf16")
    cluster = Cluster(world, method, dtype=dtype)
    for seed in range(6):
        if seed == 2:
            cluster.buckets = REBUCKETED
        before = [cluster.residuals(rank) for rank in range(world)]
        gradients = cluster.random(seed)
        updates = cluster.step(gradients)
        after = [cluster.residuals(rank) for rank in range(world)]
        for slot in ("conv", "linear", "head"):
            c = sum(before[r][slot].double() + gradients[r][slot].double() for r in range(world))
            held = sum(after[r][slot].double() for r in range(world))
            total = world * updates[0][slot].double() + held
            assert (total - c).abs().sum() <= 1e-6 * c.abs().sum()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["adtopk", "topk"])
def test_density_one_equals_dense_to_4_world_eps(name, world):
    everything = {
        "adtopk": sparse("fp32", density=1.0),
        "topk": tw.TopK(density=1.0, values="fp32", dense_fallback=False),
    }[name]
    sparse_cluster, dense_cluster = Cluster(world, everything), Cluster(world, tw.Dense())
    for seed in range(3):
        gradients = sparse_cluster.random(seed)
        ours, dense = sparse_cluster.step(gradients)[0], dense_cluster.step(gradients)[0]
        for slot in ours:
            size = sum(g[slot].abs() for g in gradients) / world
            bound = 4 * world * torch.finfo(torch.float32).eps * size
            assert ((ours[slot] - dense[slot]).abs() <= bound).all()
    assert all(not r.any() for r in sparse_cluster.residuals(0).values())


def test_values_beyond_the_wire_format_saturate_and_the_rest_stays():
    cluster = Cluster(2, sparse("fp16"), shapes={"linear": (4, 64)})
    gradients = cluster.random(0)
    gradients[0]["linear"][1, 7] = 1e6
    update = cluster.step(gradients)[0]["linear"]
    assert update[1, 7] <= 65504
    left = cluster.residuals(0)["linear"][1, 7]
    assert abs(left - (1e6 - 65504)) <= 1e6 * torch.finfo(torch.float32).eps


def test_unused_slot_of_a_bad_step_returns_exactly():
    """Given back twice, by the exchange and by the verdict: the order of the additions matters."""
    cluster = Cluster(2, sparse("bf16"), shapes={"left": (8, 64), "right": (8, 64)})
    cluster.step(cluster.random(0))
    before = [cluster.residuals(rank) for rank in range(2)]
    gradients = cluster.random(1)
    for rank in range(2):
        gradients[rank]["left"].zero_()
    gradients[0]["right"][0, 0] = torch.inf
    cluster.step(gradients)
    for rank in range(2):
        assert same_bits(cluster.residuals(rank)["left"], before[rank]["left"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slot_that_turns_dense_sends_what_is_held_once_and_frees_it(dtype):
    cluster = Cluster(3, sparse(), dtype=dtype)
    cluster.step(cluster.random(0))
    held = [cluster.residuals(rank) for rank in range(3)]
    assert held[0]["linear"].any()
    cluster.switch(tw.Dense())
    gradients = cluster.random(1)
    flushed = cluster.step(gradients)[0]["linear"]
    expected = sum(held[r]["linear"] + gradients[r]["linear"].float() for r in range(3)) / 3
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(flushed.float(), expected, rtol=tolerance, atol=tolerance)
    assert not cluster.residuals(0)["linear"].any()
    gradients = cluster.random(2)
    plain = cluster.step(gradients)[0]["linear"]
    expected = sum(g["linear"].float() for g in gradients) / 3
    torch.testing.assert_close(plain.float(), expected, rtol=tolerance, atol=tolerance)
    assert all(
        memory.nbytes() == 0 for p in cluster.reducers for memory in p.assignments.memories()
    )


def test_flush_waits_while_no_rank_has_a_gradient():
    """A parameter may be unused, or its gradient zero: then nothing is delivered and nothing lost, not even once."""
    cluster = Cluster(2, sparse())
    cluster.step(cluster.random(0))
    held = [cluster.residuals(rank) for rank in range(2)]
    cluster.switch(tw.Dense())
    gradients = cluster.random(1)
    for rank in range(2):
        gradients[rank]["linear"].zero_()
    assert not cluster.step(gradients)[0]["linear"].any()
    for rank in range(2):
        assert same_bits(cluster.residuals(rank)["linear"], held[rank]["linear"])
        assert not cluster.residuals(rank)["head"].any()
    sent = cluster.step(cluster.random(2))[0]["linear"]
    assert sent.any() and not cluster.residuals(0)["linear"].any()


def test_bad_flush_is_repeated():
    cluster = Cluster(2, sparse())
    cluster.step(cluster.random(0))
    held = cluster.residuals(0)["linear"]
    cluster.switch(tw.Dense())
    gradients = cluster.random(1)
    finite = gradients[0]["linear"].clone()
    gradients[1]["conv"][0] = torch.nan
    assert cluster.step(gradients)[0]["linear"].isnan().all()
    assert same_bits(cluster.residuals(0)["linear"], held + finite)
    cluster.step(cluster.random(2))
    assert not cluster.residuals(0)["linear"].any()


def test_switch_between_sparse_methods_carries_the_residual_over():
    cluster = Cluster(2, METHODS["topk"]("bf16"))
    cluster.step(cluster.random(0))
    held = cluster.residuals(1)
    cluster.switch(sparse("fp16", density=0.1))
    assert all(same_bits(cluster.residuals(1)[name], held[name]) for name in held)
    before = sum(sum(r[n].double().sum() for n in r) for r in map(cluster.residuals, range(2)))
    gradients = cluster.random(1)
    updates = cluster.step(gradients)[0]
    names = ("conv", "linear", "head")
    added = sum(g[n].double().sum() for g, n in itertools.product(gradients, names))
    after = sum(cluster.residuals(r)[n].double().sum() for r in range(2) for n in names)
    moved = 2 * sum(updates[n].double().sum() for n in names)
    assert abs(before + added - after - moved) < 1e-3


def test_switch_during_a_pending_bad_step_keeps_its_mass():
    cluster = Cluster(2, sparse())
    gradients = cluster.random(0)
    finite = gradients[0]["linear"].clone()
    gradients[1]["conv"][0] = torch.inf
    cluster.step(gradients)
    cluster.switch(METHODS["topk"]("bf16"))
    assert same_bits(cluster.residuals(0)["linear"], finite)


def test_method_without_memory_holds_nothing():
    cluster = Cluster(2, sparse(memory=tw.memory.NoMemory()))
    cluster.step(cluster.random(0))
    assert not any(r.any() for r in cluster.residuals(0).values())
