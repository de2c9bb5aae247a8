"""Local steps on a GPU: rounds that travel while the device works, and a common point on the host."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.local_jobs import WORKERS, make_models, mean_in_rank_order, sgd, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def train(method: tw.Method, point_device: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(the end of all workers, the mean of where they were before it)."""
    models = [model.cuda() for model in make_models()]
    optimizers = [sgd(model) for model in models]
    sim = tw.LocalSteps.simulate(
        models, optimizers, method, every=4, fragments=2, delay=1, point_device=point_device
    )
    for step in range(11):
        for rank in range(WORKERS):
            inputs = torch.randn(16, 48, generator=torch.Generator().manual_seed(9 * step + rank))
            optimizers[rank].zero_grad()
            models[rank](inputs.cuda()).square().mean().backward()
            optimizers[rank].step()
        sim.step()
    devices = {tensor.device.type for tensor in sim.workers[0].point.tensors.values()}
    assert devices == {point_device or "cuda"}
    for worker in sim.workers:
        worker.finish_now()
    mean = mean_in_rank_order([values(model) for model in models])
    sim.finish()
    assert all(torch.equal(values(model), values(models[0])) for model in models)
    return values(models[0]), mean


def test_a_common_point_on_the_host_is_that_of_the_device() -> None:
    for method in (tw.Dense(), tw.Quantized(bits=4, dense_fallback=False)):
        (there, _), (here, _) = train(method, None), train(method, "cpu")
        # The outer steps of the two may round in another way, and a code may then choose the neighbour.
        torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-4)


def test_the_end_is_the_mean_of_where_workers_were() -> None:
    end, mean = train(tw.Dense(), None)
    torch.testing.assert_close(end, mean, rtol=0, atol=1e-6)
