"""Merges of lists by kernels on a GPU: the bits of the parts on whole layers."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_picked import SHAPES
from tests.gpu.test_split import wrong_and_normal
from tests.kernels.test_split import LARGE
from tests.kernels.test_tree import compare, gtopk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("conserve", [True, False])
@pytest.mark.parametrize(("world", "values"), [(2, "fp32"), (4, "bf16"), (7, "fp16")])
def test_layers(kernels, world, values, conserve):
    method = gtopk(values=values, conserve=conserve)
    compare(kernels, method, world=world, shapes=SHAPES, device="cuda")


def test_ties(kernels):
    def change(count, gradients):
        for one in gradients:
            one["matrix"].copy_((one["matrix"] * 2).round() / 2)

    method = gtopk(values="bf16", conserve=True)
    compare(kernels, method, world=4, shapes=LARGE, device="cuda", change=change, discard=(1,))


def test_what_is_not_finite(kernels):
    options = {"change": wrong_and_normal, "discard": (3,)}
    compare(kernels, gtopk(conserve=True), device="cuda", steps=5, world=2, **options)
