"""The kernels of a reused threshold on a GPU against the parts they stand for, on whole layers."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_fused import LAYERS, draw, tied
from tests.kernels.test_fused_threshold import compare, method

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("gradients", [draw, tied])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3])
def test_layers(kernels, density, gradients):
    compare(kernels, method(density), gradients, shapes=LAYERS, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients(kernels, dtype):
    compare(kernels, method(0.01), draw, shapes=LAYERS, device="cuda", dtype=dtype)


@pytest.mark.parametrize("factor", [0.0, 100.0])
def test_a_shift_of_the_distribution(kernels, factor):
    """Nothing reaches the old threshold, or nearly everything does."""

    def gradients(cluster, count):
        made = draw(cluster, count)
        if count < 3:
            return made
        return [{name: factor * g for name, g in one.items()} for one in made]

    compare(kernels, method(0.01, tau=9), gradients, shapes=LAYERS, device="cuda")
