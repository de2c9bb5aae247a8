"""Exchanges that agree on places, by kernels on a GPU: the bits of the parts on whole layers."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.gpu.test_picked import SHAPES
from tests.kernels.test_agreed import METHODS, compare, topk, wrong

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ALL = {**METHODS, "exclusive": topk}


@pytest.mark.parametrize("values", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ALL)
def test_layers(kernels, name, values):
    compare(kernels, ALL[name](values=values), shapes=SHAPES, device="cuda", discard=(1,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_narrow_gradients(kernels, name, dtype):
    compare(kernels, ALL[name](), shapes=SHAPES, device="cuda", dtype=dtype, discard=(1,))


@pytest.mark.parametrize("storage", ["bf16", "int8"])
@pytest.mark.parametrize("name", ALL)
def test_narrow_memories(kernels, name, storage):
    method = ALL[name](memory=tw.memory.Residual(storage=storage))
    compare(kernels, method, shapes=SHAPES, device="cuda", packed=True, discard=(1,))


@pytest.mark.parametrize("restorable", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_bad_and_discarded_steps_and_slots_without_a_gradient(kernels, name, restorable):
    options = {"change": wrong, "discard": (0, 4), "restorable": restorable}
    compare(kernels, ALL[name](), world=2, steps=6, device="cuda", **options)
