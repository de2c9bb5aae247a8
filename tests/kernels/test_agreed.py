"""Memory and updates by kernels around exchanges that agree on places: the bits of the parts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.kernels.comparing import SHAPES, compare_steps
from tests.kernels.cpu_compiler import needs_compiler
from tests.lanes import slow
from thinwire.compress.agreed_routes import AgreedRoute

pytestmark = [needs_compiler, pytest.mark.timeout(300)]

EXCLUSIVE = tw.exchange.Exclusive()
LARGE = {"matrix": (300, 257), "row": (3, 128), "long": (70_001,), "bias": (17,)}


def topk(exchange=EXCLUSIVE, density=0.05, **options):
    return tw.TopK(density=density, exchange=exchange, dense_fallback=False, **options)


def compare(kernels, method, *, steps=3, world=3, packed=False, **options):
    accepted = not packed and not options.get("restorable")
    compare_steps(
        kernels, method, AgreedRoute, steps=steps, world=world, accepted=accepted, **options
    )


@pytest.mark.parametrize(
    ("world", "values"),
    [(2, "fp32"), (3, "bf16"), slow(4, "fp16"), slow(1, "fp32"), slow(1, "bf16")],
)
def test_bits(kernels, world, values):
    compare(kernels, topk(values=values), world=world, rebucketed=True)


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
    ours = ("open_memory", "take_blocks", "clear_bucket", "write_entries")
    assert [kinds[name] for name in ours] == [2] * 4, "one of each for every rank"
