"""Compression in Adam's scale on a GPU: what the CPU computes, with CUDA graphs, and without a wait. Kernels against torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.kernels import test_topk_adam as topk
from tests.kernels.adam_scale import MEMORIES, spoiled
from tests.kernels.test_quantize_adam import compare, scaled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
METHODS = {
    "top-k": tw.AdamScale(method=tw.TopK(density=0.1, dense_fallback=False), start=3),
    "all-dimension, refreshed": tw.AdamScale(
        method=tw.ADTopK(density=0.1, dense_fallback=False),
        start=3,
        divisor=tw.memory.Refresh(every=2),
        limit=3.0,
    ),
    "1 bit, refreshed": tw.AdamScale(
        method=tw.Quantized(bits=1, dense_fallback=False),
        start=3,
        divisor=tw.memory.Refresh(every=2),
        limit=3.0,
    ),
    "2 bits": tw.AdamScale(method=tw.Quantized(bits=2, dense_fallback=False), start=3),
}


SHAPES = {"attention": (1024, 1024), "conv": (256, 256, 3, 3), "tail": (10, 131), "odd": (7, 1025)}


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_the_kernels_have_the_bits_of_torch(kernels, bits: int, memory: str) -> None:
    compare(kernels, scaled(bits, memory), shapes=SHAPES, device="cuda")


@pytest.mark.parametrize("sum_bits", [2, 4, 8])
def test_sums_with_a_code_of_their_own(kernels, sum_bits: int) -> None:
    compare(kernels, scaled(1, sum_bits=sum_bits), shapes=SHAPES, device="cuda", world=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_gradients(kernels, dtype: torch.dtype) -> None:
    compare(kernels, scaled(1), shapes=SHAPES, device="cuda", dtype=dtype)


@pytest.mark.parametrize("restorable", [False, True])
def test_bad_and_discarded_steps_and_slots_without_a_gradient(kernels, restorable: bool) -> None:
    changes = {"change": spoiled, "discard": (3,), "restorable": restorable}
    shapes = {"row": (300, 128), "long": (9, 1031), "odd": (5, 7), "conv": (6, 3, 3, 3)}
    compare(kernels, scaled(1), steps=5, shapes=shapes, device="cuda", **changes)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", ["whole", "rows", "columns"])
def test_top_k_has_the_bits_of_torch(kernels, name: str, memory: str) -> None:
    topk.compare(kernels, topk.scaled(name, memory), shapes=SHAPES, steps=4, device="cuda")


@pytest.mark.parametrize("density", [0.001, 0.2])
def test_top_k_of_other_densities(kernels, density: float) -> None:
    for name in ("whole", "rows", "columns"):
        method = topk.scaled(name, density=density)
        topk.compare(kernels, method, shapes=SHAPES, steps=4, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_top_k_of_narrow_gradients(kernels, dtype: torch.dtype) -> None:
    topk.compare(kernels, topk.scaled("whole"), shapes=SHAPES, device="cuda", dtype=dtype)


@pytest.mark.parametrize("restorable", [False, True])
@pytest.mark.parametrize("name", ["whole", "rows", "columns"])
def test_bad_and_discarded_steps_of_top_k(kernels, name: str, restorable: bool) -> None:
    changes = {"change": spoiled, "discard": (3,), "restorable": restorable}
    shapes = {"row": (300, 128), "long": (9, 1031), "odd": (5, 7), "conv": (6, 3, 3, 3)}
    topk.compare(kernels, topk.scaled(name), steps=5, shapes=shapes, device="cuda", **changes)


def train(
    method: tw.AdamScale, device: str, *, capturable: bool = False, graph: bool = False
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 96), nn.Tanh(), nn.Linear(96, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6, capturable=capturable)
    simulation = tw.simulate(model, method, workers=3, optimizer=optimizer, graph=graph)

    def compute(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        batches = [(torch.randn(16, 40, generator=generator).to(device),) for _ in range(3)]
        simulation.step(compute, batches)
        optimizer.step()
    plan = simulation.plan()
    assert not plan["0.weight"].dense
    if device == "cuda":
        assert plan.backends["0.weight"].startswith("CUDA kernels")
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"graph": True}], ids=str)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_gpu_trains_as_the_cpu_does(method: tw.AdamScale, options: dict) -> None:
    """Nearly everywhere to a tenth of a step: where two entries are nearly alike another one may be chosen."""
    ours, theirs = train(method, "cuda", **options), train(method, "cpu")
    for a, b in zip(ours, theirs, strict=True):
        assert a.isfinite().all()
        assert ((a - b).abs() > 0.1 * 0.01).float().mean() < 0.05


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_step_behind_the_dense_start_does_not_wait(method: tw.AdamScale) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 96), nn.Tanh(), nn.Linear(96, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    simulation = tw.simulate(model, method, workers=2, optimizer=optimizer)
    x = torch.randn(16, 40, device="cuda")

    def step() -> None:
        simulation.step(lambda x: model(x).square().mean(), [(x,), (x,)])
        optimizer.step()

    for _ in range(8):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
