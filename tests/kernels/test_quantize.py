"""The kernels of quantised sums, run on the CPU, give the bits of the torch reference."""

from __future__ import annotations

import itertools

import pytest
import torch

import thinwire as tw
from tests.kernels.comparing import check_broken_exchange, compare_steps
from tests.kernels.cpu_compiler import needs_compiler
from tests.lanes import mostly_slow
from thinwire.compress.quantized_kernel_routes import QuantizedKernelAccount, QuantizedKernelRoute

pytestmark = [needs_compiler, pytest.mark.timeout(300)]


def quantized(bits, **options):
    return tw.Quantized(bits=bits, dense_fallback=False, **options)


def compare(kernels, method, *, steps=3, world=2, **options):
    compare_steps(
        kernels,
        method,
        QuantizedKernelRoute,
        steps=steps,
        world=world,
        accepted=not options.get("restorable"),
        rebucketed=True,
        **options,
    )


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", [16, 8, 4, 2, 1])
def test_codes(kernels, bits, rounding):
    compare(kernels, quantized(bits, rounding=rounding))


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        itertools.product((8, 4, 2, 1), (16, 8, 4, 2, 1), ("nearest", "stochastic")),
        lambda case: case in [(1, 2, "nearest"), (1, 8, "stochastic"), (4, 16, "nearest")],
    ),
    ids=str,
)
def test_sums_with_a_code_of_their_own(kernels, case):
    bits, sum_bits, rounding = case
    compare(kernels, quantized(bits, sum_bits=sum_bits, rounding=rounding), steps=2)


@pytest.mark.parametrize("block", [64, 256])
@pytest.mark.parametrize("bits", [16, 4, 1])
def test_blocks(kernels, bits, block):
    compare(kernels, quantized(bits, block=block), steps=2)


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("bits", [8, 2])
def test_worlds(kernels, bits, world):
    compare(kernels, quantized(bits), world=world, steps=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [8, 4, 1])
def test_narrow_gradients(kernels, bits, dtype):
    compare(kernels, quantized(bits), dtype=dtype)


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_narrow_memories(kernels, storage):
    compare(kernels, quantized(4, memory=tw.memory.Residual(storage=storage)), restorable=True)


@pytest.mark.parametrize("bits", [8, 1])
def test_without_memory(kernels, bits):
    compare(kernels, quantized(bits, memory=tw.memory.NoMemory()), restorable=True)


def unused(count, gradients):
    for one in gradients:
        one["long"].zero_()
    if count == 1:
        gradients[0]["row"][1, 5] = torch.inf


@pytest.mark.parametrize("restorable", [False, True])
@pytest.mark.parametrize("bits", [8, 2])
def test_bad_and_discarded_steps_and_slots_without_a_gradient(kernels, bits, restorable):
    compare(kernels, quantized(bits), change=unused, steps=4, discard=(2,), restorable=restorable)


def huge(count, gradients):
    for one in gradients:
        one["row"].fill_(3e38)
        one["odd"].mul_(1e-42)


@pytest.mark.parametrize("bits", [16, 8, 4, 2, 1])
def test_sums_that_overflow_and_numbers_next_to_nothing(kernels, bits):
    compare(kernels, quantized(bits), change=huge, steps=2)


def test_loss_scales(kernels):
    scales = iter([2.0, 2.0, 0.5, 0.5, 8.0, 8.0] * 2)
    compare(kernels, quantized(4), scale=lambda: torch.tensor(next(scales)))


def test_a_broken_exchange_returns_all(kernels):
    check_broken_exchange(quantized(4), QuantizedKernelAccount)
