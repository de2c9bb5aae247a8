"""Memory and selection by kernels on a GPU, the exchange in torch: the bits of the parts on whole layers."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.kernels.test_picked import METHODS, compare
from thinwire.exchange.sums import divide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = {
    "attention": (1024, 1024),
    "embedding": (3000, 1031),
    "conv": (256, 256, 3, 3),
    "tail": (10, 131),
    "bias": (4097,),
}


@pytest.mark.parametrize("values", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", METHODS)
def test_layers(kernels, name, values):
    compare(kernels, METHODS[name](values=values), shapes=SHAPES, device="cuda", steps=3)


@pytest.mark.parametrize("world", [1, 4, 7])
def test_worlds(kernels, world):
    compare(kernels, METHODS["oktopk"](), world=world, shapes=SHAPES, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_gradients(kernels, dtype):
    compare(kernels, METHODS["oktopk"](), shapes=SHAPES, device="cuda", dtype=dtype)


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_narrow_memories(kernels, storage):
    method = METHODS["oktopk"](memory=tw.memory.Residual(storage=storage))
    compare(kernels, method, shapes=SHAPES, device="cuda", packed=True)


@pytest.mark.parametrize("world", [3, 4, 5, 6, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dense_means_are_divided_as_on_a_cpu(world, dtype):
    flat = torch.randn(4097, generator=torch.Generator().manual_seed(world)).to(dtype)
    assert torch.equal(divide(flat.cuda(), world).cpu(), divide(flat.clone(), world))
