"""The fused kernels on a GPU against the parts they stand for, on whole layers."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.kernels.test_fused import (
    adtopk,
    compare,
    corrected_rows,
    correction,
    dgc,
    find_carriers,
)
from tests.kernels.test_fused_multi_block_rows import AGAIN, FEW, READY, SLOW, run
from thinwire.methods.base import DenseMomentum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYERS = {
    "attention": (1024, 1024),
    "up": (4096, 1024),
    "down": (1024, 4096),
    "conv": (512, 512, 3, 3),
    "stem": (64, 3, 7, 7),
    "classifier": (512, 25_088),
    "point": (256, 64, 1, 1),
    "gpt": (768, 1280),
    "tail": (10, 131),
}
COLUMNS = {"embedding": (30_522, 128), "conv1d": (1280, 5120), "small": (3072, 768)}


def draw(cluster, count):
    generator = torch.Generator(device="cuda").manual_seed(count)
    return [
        {
            name: torch.randn(info.shape, generator=generator, device="cuda").to(cluster.dtype)
            for name, info in cluster.infos.items()
        }
        for _ in range(cluster.world)
    ]


def tied(cluster, count):
    return [
        {name: (g * 2).round() / 2 for name, g in by_name.items()}
        for by_name in draw(cluster, count)
    ]


@pytest.mark.parametrize("gradients", [draw, tied])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3])
def test_layers(kernels, density, gradients):
    compare(kernels, adtopk(density), gradients, shapes=LAYERS, device="cuda")


@pytest.mark.parametrize("gradients", [draw, tied])
def test_columns(kernels, gradients):
    compare(kernels, adtopk(0.01, axis=0), gradients, shapes=COLUMNS, device="cuda", steps=5)


@pytest.mark.parametrize("world", [1, 5])
def test_worlds(kernels, world):
    whole = tw.TopK(density=0.01, dense_fallback=False)
    for method, shapes in (
        (adtopk(0.01), LAYERS),
        (adtopk(0.01, axis=0), COLUMNS),
        (whole, LAYERS),
    ):
        compare(kernels, method, draw, shapes=shapes, device="cuda", steps=2, world=world)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients(kernels, dtype):
    compare(kernels, adtopk(0.01), draw, shapes=LAYERS, device="cuda", dtype=dtype)


@pytest.mark.parametrize("values", ["fp32", "fp16"])
def test_value_codes(kernels, values):
    compare(kernels, adtopk(0.01, values=values), draw, shapes=LAYERS, device="cuda")


@pytest.mark.parametrize("gradients", [draw, tied])
@pytest.mark.parametrize("density", [0.001, 0.01])
def test_whole_tensors(kernels, density, gradients):
    method = tw.TopK(density=density, dense_fallback=False)
    compare(kernels, method, gradients, shapes=LAYERS, device="cuda")


def eventful(cluster, count):
    """Two tensors without a gradient, six steps like each other, then grown, vanished, and what memory holds cancelled."""
    made = draw(cluster, count)
    for rank, by_name in enumerate(made):
        if count == 8:
            held = cluster.residuals(rank)
            by_name.update({name: g * 1e-3 - held[name] for name, g in by_name.items()})
        for name, g in by_name.items():
            g *= {6: 1000.0, 7: 1e-3}.get(count, 1.0) if name not in ("up", "tail") else 0.0
    return made


@pytest.mark.parametrize("method", ["plain", "momentum"])
def test_whole_tensors_whichever_way_they_go(kernels, method):
    methods = {"plain": tw.TopK(density=0.01, dense_fallback=False), "momentum": dgc(0.01)}
    seen = run(kernels, methods[method], eventful, shapes=LAYERS, device="cuda", steps=10)
    without = [list(LAYERS).index(name) for name in ("up", "tail")]
    for step in seen:
        assert [step.pop(which) for which in reversed(without)] == [FEW, FEW]
    assert set(seen[0]) == set(seen[6]) == {AGAIN}
    if method == "plain":
        assert set(seen[5]) == {READY} and set(seen[8]) == {SLOW}
        # What was collected again may leave one too few candidates.
        assert READY in seen[7]


@pytest.mark.parametrize("gradients", [draw, tied])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_of_layers(kernels, nesterov, gradients):
    method = corrected_rows(0.01, nesterov=nesterov)
    compare(kernels, method, gradients, shapes=LAYERS, device="cuda", discard=(1,))


@pytest.mark.parametrize("gradients", [draw, tied])
def test_momentum_of_columns(kernels, gradients):
    method = corrected_rows(0.01, masking=False, axis=0)
    compare(kernels, method, gradients, shapes=COLUMNS, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("density", [0.001, 0.01])
def test_momentum_of_whole_tensors(kernels, density, dtype):
    method = dgc(density, nesterov=True)
    compare(kernels, method, draw, shapes=LAYERS, device="cuda", dtype=dtype, discard=(1,))


def test_momentum_under_a_changing_scale(kernels):
    current = torch.tensor(1024.0, device="cuda")

    def scaled(cluster, count):
        current.fill_([1024.0, 2048.0, 512.0][count])
        return draw(cluster, count)

    compare(kernels, dgc(0.01), scaled, shapes=LAYERS, device="cuda", scale=lambda: current)


@pytest.mark.parametrize("bias", [1025, 200_000])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_of_dense_tensors(kernels, bias, nesterov):
    """Gathered with the payload, and summed."""
    fast, _ = compare(
        kernels,
        tw.DGC(density=0.01, memory=correction(nesterov)),
        draw,
        shapes={**LAYERS, "bias": (bias,), "norm": (7,)},
        policy=[tw.rule("bias", method=DenseMomentum(momentum=0.9, nesterov=nesterov))],
        device="cuda",
        discard=(1,),
    )
    assert [carrier.summed for carrier in find_carriers(fast)] == [bias > 1025]
