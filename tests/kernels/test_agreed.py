"""Exchanges that agree on places, by kernels from the gradient to the update: the bits of the parts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.kernels.comparing import SHAPES, compare_steps
from tests.kernels.cpu_compiler import needs_compiler
from tests.lanes import slow
from thinwire.compress.agreed_routes import AgreedRoute, LoneRoute

pytestmark = [needs_compiler, pytest.mark.timeout(300)]

EXCLUSIVE = tw.exchange.Exclusive()
KERNELS = ("take_entries", "add_entries", "clear_bucket", "deliver_entries")
LARGE = {"matrix": (300, 257), "row": (3, 128), "long": (70_001,), "bias": (17,)}


METHODS = {
    "random": lambda **o: tw.RandomK(density=0.05, dense_fallback=False, **o),
    "chunks": lambda **o: tw.ChunkTopK(density=0.1, chunk=50, dense_fallback=False, **o),
}


def topk(exchange=EXCLUSIVE, density=0.05, **options):
    return tw.TopK(density=density, exchange=exchange, dense_fallback=False, **options)


def compare(kernels, method, *, steps=3, world=3, packed=False, **options):
    accepted = not packed and not options.get("restorable")
    route = LoneRoute if world == 1 else AgreedRoute
    compare_steps(kernels, method, route, steps=steps, world=world, accepted=accepted, **options)


@pytest.mark.parametrize(
    ("world", "values"),
    [(2, "fp32"), (3, "bf16"), slow(4, "fp16"), slow(1, "fp32"), slow(1, "bf16")],
)
def test_bits(kernels, world, values):
    compare(kernels, topk(values=values), world=world, rebucketed=True)


@pytest.mark.parametrize(
    ("world", "values"),
    [(2, "fp32"), (3, "bf16"), slow(4, "fp16"), slow(5, "bf16"), slow(1, "bf16")],
)
@pytest.mark.parametrize("name", METHODS)
def test_bits_at_places_all_ranks_know(kernels, name, world, values):
    compare(kernels, METHODS[name](values=values), world=world, rebucketed=True)


@pytest.mark.parametrize("exchange", [EXCLUSIVE, tw.exchange.CyclicLeader()], ids=repr)
def test_rows(kernels, exchange):
    compare(kernels, tw.ADTopK(density=0.1, exchange=exchange, dense_fallback=False), world=2)


@pytest.mark.parametrize("density", [0.01, slow(0.1)])
def test_blocks_of_several_sizes(kernels, density):
    compare(kernels, topk(density=density), world=4, steps=2, shapes=LARGE)


def wrong(count, gradients):
    for one in gradients:
        one["row"].zero_()
        one["long"].copy_(torch.where(one["long"] > 0, 1.0, -1.0))
    if count == 1:
        gradients[0]["conv"].view(-1)[3] = torch.inf
        gradients[1]["odd"].view(-1)[7] = torch.nan
    if count >= 2:
        gradients[0]["long"].view(-1)[5:900] = 3e38
        gradients[1]["long"].view(-1)[5:900] = 3e38


@pytest.mark.parametrize("restorable", [False, slow(True)])
@pytest.mark.parametrize("values", ["fp32", slow("bf16")])
def test_zeros_ties_and_what_is_not_finite(kernels, values, restorable):
    compare(
        kernels, topk(values=values), change=wrong, steps=5, world=2, discard=(4,),
        restorable=restorable,
    )  # fmt: skip


@pytest.mark.parametrize("restorable", [False, slow(True)])
@pytest.mark.parametrize("values", ["bf16", slow("fp32"), slow("fp16")])
@pytest.mark.parametrize("name", METHODS)
def test_discarded_steps(kernels, name, values, restorable):
    """With slots that no rank had a gradient for, sums beyond the wire's range and steps that are taken back after all."""
    compare(
        kernels, METHODS[name](values=values), change=wrong, steps=6, world=2, discard=(0, 4),
        restorable=restorable,
    )  # fmt: skip


@pytest.mark.parametrize("storage", ["fp32", slow("bf16"), slow("int8")])
@pytest.mark.parametrize("name", ["random", slow("chunks")])
def test_narrow_gradients_that_are_discarded(kernels, name, storage):
    method = METHODS[name](memory=tw.memory.Residual(storage=storage))
    packed = storage != "fp32"
    compare(kernels, method, dtype=torch.bfloat16, discard=(1,), packed=packed)


@pytest.mark.slow
@pytest.mark.parametrize("density", [0.003, 0.5])
@pytest.mark.parametrize("name", METHODS)
def test_longer_tensors(kernels, name, density):
    make = {"random": tw.RandomK, "chunks": tw.ChunkTopK}[name]
    compare(kernels, make(density=density, dense_fallback=False), world=4, shapes=LARGE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)], ids=str)
def test_narrow_gradients(kernels, dtype):
    compare(kernels, topk(), dtype=dtype)


@pytest.mark.parametrize("storage", ["bf16", slow("int8")])
def test_narrow_memories(kernels, storage):
    compare(kernels, topk(memory=tw.memory.Residual(storage=storage)), packed=True)


@pytest.mark.slow
def test_loss_scales(kernels):
    scales = iter([2.0] * 3 + [0.5] * 3 + [8.0] * 3 + [2.0] * 3 + [0.5] * 3 + [8.0] * 3)
    compare(kernels, topk(), scale=lambda: torch.tensor(next(scales)))


def test_launches(launched):
    cluster = Cluster(2, topk(), shapes=SHAPES)
    cluster.step(cluster.random(0))
    launched.clear()
    cluster.step(cluster.random(1))
    kinds = Counter(launched)
    ours = ("open_memory", "take_blocks", *KERNELS)
    assert [kinds[name] for name in ours] == [2] * len(ours), "one of each for every rank"


@pytest.mark.parametrize("name", METHODS)
def test_launches_at_places_all_ranks_know(launched, name):
    cluster = Cluster(2, METHODS[name](), shapes=SHAPES)
    cluster.step(cluster.random(0))
    launched.clear()
    cluster.step(cluster.random(1))
    kinds = Counter(launched)
    ours = ("open_memory", *KERNELS)
    assert [kinds[name] for name in ours] == [2] * len(ours), "one of each for every rank"
    assert not {"inspect_slots", "find_non_finite", "drop_non_finite"} & set(kinds)


@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize("name", METHODS)
def test_what_a_sum_lost_when_it_overflowed_does_not_stay(kernels, name, by_kernels):
    kernels(by_kernels)
    cluster = Cluster(2, METHODS[name](), shapes={"w": (40, 50)})
    gradients = cluster.random(0)
    for one in gradients:
        one["w"].fill_(3e38)
    cluster.step(gradients)
    assert all(cluster.residuals(rank)["w"].isfinite().all() for rank in range(2))
