"""Memory and selection by kernels, the exchange in torch: the bits of the parts, for every exchange that adds on the way."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.kernels.comparing import compare_steps
from tests.kernels.cpu_compiler import needs_compiler
from thinwire.compress.picked_routes import PickedRoute

pytestmark = [needs_compiler, pytest.mark.timeout(300)]

METHODS = {
    "oktopk": lambda **o: tw.OkTopK(density=0.05, dense_fallback=False, **o),
    "full": lambda **o: tw.OkTopK(
        density=0.05,
        dense_fallback=False,
        exchange=tw.exchange.SplitReduce(contribution="full"),
        **o,
    ),
    "columns": lambda **o: tw.ADTopK(
        density=0.05, axis=0, dense_fallback=False, exchange=tw.exchange.TreeMerge(), **o
    ),
    "regions": lambda **o: tw.TopKDSA(density=0.2, dense_fallback=False, **o),
}


def compare(kernels, method, *, steps=2, world=3, packed=False, **options):
    compare_steps(
        kernels, method, PickedRoute, steps=steps, world=world, accepted=not packed, **options
    )


@pytest.mark.parametrize("values", ["fp32", "bf16"])
@pytest.mark.parametrize("name", METHODS)
def test_bits(kernels, name, values):
    compare(kernels, METHODS[name](values=values))


@pytest.mark.parametrize("world", [1, 4])
def test_worlds(kernels, world):
    compare(kernels, METHODS["oktopk"](), world=world)


@pytest.mark.slow
def test_narrow_gradients(kernels):
    compare(kernels, METHODS["oktopk"](), dtype=torch.bfloat16)


def test_zeros_ties_and_numbers_that_are_not_finite(kernels):
    def change(count, gradients):
        for rank, one in enumerate(gradients):
            one["row"].zero_()
            one["long"].copy_(torch.where(one["long"] > 0, 1.0, -1.0) * (-1) ** rank)
        if count == 1:
            gradients[0]["conv"].view(-1)[3] = torch.inf
        if count == 2:
            gradients[1]["long"].view(-1)[5] = 3e38
            gradients[2]["long"].view(-1)[5] = 3e38

    compare(kernels, METHODS["oktopk"](values="fp16"), change=change, steps=4)


def test_a_narrow_memory(kernels):
    memory = tw.memory.Residual(storage="bf16")
    compare(kernels, METHODS["oktopk"](memory=memory), packed=True)
