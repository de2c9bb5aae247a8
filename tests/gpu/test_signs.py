"""Signs by kernels on a GPU, scaled ones and votes: the bits of torch on whole layers."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_signs import compare_scaled, compare_votes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = {"attention": (1024, 1024), "long": (3000, 1031), "odd": (3, 431), "last": (2, 650)}
NARROW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("world", [1, 3, 4])
def test_scaled_signs(kernels, world):
    compare_scaled(kernels, world, shapes=SHAPES, device="cuda")


@pytest.mark.parametrize("abstain", [True, False])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_votes(kernels, world, abstain):
    compare_votes(kernels, abstain, world, shapes=SHAPES, device="cuda")


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_gradients(kernels, dtype):
    compare_scaled(kernels, 3, shapes=SHAPES, device="cuda", dtype=dtype)
    compare_votes(kernels, True, 3, shapes=SHAPES, device="cuda", dtype=dtype)
