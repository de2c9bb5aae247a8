"""Thresholds that are estimated, by kernels on a GPU against the parts they stand for, on whole layers."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.gpu.test_fused import LAYERS, draw, tied
from tests.kernels.test_fused_estimate import METHODS, compare, method

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FEW = {name: LAYERS[name] for name in ("attention", "conv", "tail")}


@pytest.mark.parametrize("gradients", [draw, tied])
@pytest.mark.parametrize("name", METHODS)
def test_layers(kernels, name, gradients):
    compare(kernels, method(name, 0.01), gradients, shapes=LAYERS, device="cuda", steps=3)


@pytest.mark.parametrize("density", [0.001, 0.3])
@pytest.mark.parametrize("name", ["gaussiank", "redsync", "sidco"])
def test_densities(kernels, name, density):
    compare(kernels, method(name, density), draw, shapes=FEW, device="cuda", steps=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_gradients(kernels, dtype):
    options = {"shapes": FEW, "device": "cuda", "dtype": dtype, "discard": (1,)}
    compare(kernels, method("redsync"), draw, steps=3, **options)


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_narrow_memories(kernels, storage):
    narrow = method("gaussiank", memory=tw.memory.Residual(storage=storage))
    compare(kernels, narrow, draw, shapes=FEW, device="cuda", steps=3)


def eventful(cluster, count):
    made = draw(cluster, count)
    if count == 1:
        made[1]["conv"].view(-1)[3] = torch.inf
    if count == 2:
        for one in made:
            one["tail"].zero_()
    return made


@pytest.mark.parametrize("name", ["gaussiank", "redsync", "sidco"])
def test_bad_and_discarded_steps_and_slots_without_a_gradient(kernels, name):
    compare(kernels, method(name), eventful, shapes=FEW, device="cuda", steps=5, discard=(3,))
