"""Split-and-reduce by kernels on a GPU: the bits of the parts on whole layers."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.gpu.test_picked import SHAPES
from tests.kernels.test_split import LARGE, compare, oktopk, topkdsa, wrong

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("values", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_layers(kernels, world, values):
    compare(kernels, oktopk(values=values), world=world, shapes=SHAPES, device="cuda")


@pytest.mark.parametrize("values", ["fp32", "bf16"])
def test_all_sums_come_back(kernels, values):
    compare(kernels, topkdsa(values=values), world=3, shapes=SHAPES, device="cuda", discard=(1,))


@pytest.mark.parametrize("capacity", [1.0, 1.5])
def test_crowds_and_ties(kernels, capacity):
    def change(count, gradients):
        for one in gradients:
            one["long"][:9_000].mul_(100.0)
            one["matrix"].copy_((one["matrix"] * 2).round() / 2)

    exchange = tw.exchange.SplitReduce(capacity=capacity)
    method = oktopk(exchange=exchange, values="bf16")
    compare(kernels, method, world=4, shapes=LARGE, device="cuda", change=change, discard=(1,))


def test_what_is_not_finite(kernels):
    def change(count, gradients):
        if count == 1:
            gradients[0]["long"][3] = torch.inf
        if count == 2:
            for one in gradients:
                one["long"][5] = 3e38

    compare(kernels, oktopk(), shapes=LARGE, device="cuda", change=change, steps=5, discard=(3,))


@pytest.mark.parametrize("restorable", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_gradients_that_are_discarded(kernels, dtype, restorable):
    options = {"device": "cuda", "dtype": dtype, "restorable": restorable}
    compare(kernels, oktopk(), shapes=SHAPES, steps=4, discard=(0, 2), **options)


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_narrow_memories(kernels, storage):
    method = oktopk(memory=tw.memory.Residual(storage=storage))
    compare(kernels, method, shapes=SHAPES, device="cuda", packed=True, discard=(1,))


def wrong_and_normal(count, gradients):
    """Torch's own sums on CUDA drop what is subnormal, because they are made of atomic additions. The kernels keep it."""
    for one in gradients:
        one["odd"].mul_(1e12)
    wrong(count, gradients)


@pytest.mark.parametrize("restorable", [False, True])
def test_zeros_ties_cancelled_sums_and_what_is_not_finite(kernels, restorable):
    options = {"change": wrong_and_normal, "discard": (3,), "restorable": restorable}
    compare(kernels, oktopk(), world=2, steps=5, device="cuda", **options)
