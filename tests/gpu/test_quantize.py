"""Quantised sums on a GPU: the kernels against the torch reference on whole layers, and that against the CPU."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.kernels.test_quantize import compare, quantized, unused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = {
    "attention": (1024, 1024),
    "conv": (256, 256, 3, 3),
    "stem": (64, 3, 7, 7),
    "tail": (10, 131),
    "bias": (4097,),
    "odd": (7, 1025),
}


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", [16, 8, 4, 2, 1])
def test_layers(kernels, bits, rounding):
    compare(kernels, quantized(bits, rounding=rounding), shapes=SHAPES, device="cuda")


@pytest.mark.parametrize("bits, sum_bits", [(1, 2), (1, 8), (4, 16)])
def test_sums_with_a_code_of_their_own(kernels, bits, sum_bits):
    method = quantized(bits, sum_bits=sum_bits)
    compare(kernels, method, shapes=SHAPES, device="cuda", world=4, steps=2)


@pytest.mark.parametrize("block", [64, 256])
@pytest.mark.parametrize("bits", [8, 1])
def test_blocks(kernels, bits, block):
    compare(kernels, quantized(bits, block=block), shapes=SHAPES, device="cuda", steps=2)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_worlds(kernels, world):
    compare(kernels, quantized(4), world=world, shapes=SHAPES, device="cuda", steps=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_gradients(kernels, dtype):
    compare(kernels, quantized(4), shapes=SHAPES, device="cuda", dtype=dtype)


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_narrow_memories(kernels, storage):
    method = quantized(4, memory=tw.memory.Residual(storage=storage))
    compare(kernels, method, shapes=SHAPES, device="cuda", restorable=True)


def test_without_memory(kernels):
    method = quantized(8, memory=tw.memory.NoMemory())
    compare(kernels, method, shapes=SHAPES, device="cuda", restorable=True)


@pytest.mark.parametrize("restorable", [False, True])
def test_bad_and_discarded_steps_and_slots_without_a_gradient(kernels, restorable):
    changes = {"change": unused, "discard": (2,), "restorable": restorable}
    shapes = {"row": (300, 128), "long": (9, 1031), "odd": (5, 7), "conv": (6, 3, 3, 3)}
    compare(kernels, quantized(2), steps=4, shapes=shapes, device="cuda", **changes)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", [16, 8, 4, 2, 1, "fp8"])
def test_a_gpu_has_the_bits_of_a_cpu(bits, rounding):
    """Whoever does the work: kernels where they know the code, torch for the others."""
    found = []
    for device in ("cuda", "cpu"):
        cluster = Cluster(3, quantized(bits, rounding=rounding), device=device)
        for step in range(3):
            updates = cluster.step(cluster.random(step))
        held = [cluster.residuals(rank) for rank in range(3)]
        found.append([one[name].cpu() for one in (*updates, *held) for name in ("linear", "conv")])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
