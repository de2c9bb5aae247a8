"""Compressing and decompressing a bucket can be captured as a CUDA graph: fixed shapes, no host waits, nothing the host decides."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.gpu.test_fused import LAYERS, draw
from thinwire.compress.kernel_routes import TopKRoute
from thinwire.kernels.cuda.fused_topk import FusedTopK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

METHODS = {
    "rows": tw.ADTopK(density=0.01, dense_fallback=False),
    "columns": tw.ADTopK(density=0.01, axis=0, dense_fallback=False),
    "tensors": tw.TopK(density=0.01, dense_fallback=False),
    "packed": tw.ADTopK(density=0.01, dense_fallback=False, indices="packed"),
}


def make_kernels(method: tw.Method) -> tuple[FusedTopK, int]:
    """Those of one rank, and the size of its bucket."""
    cluster = Cluster(1, method, shapes=LAYERS, device="cuda")
    cluster.step(draw(cluster, 0))
    (plan,) = cluster.reducers[0].plans.values()
    (route,) = plan.routes
    assert isinstance(route, TopKRoute)
    return route.kernels, max(slot.offset + slot.numel for slot in route.group.sources)


@pytest.mark.parametrize("name", METHODS)
def test_a_captured_step_gives_the_bits_of_one_that_is_not(name):
    kernels, size = make_kernels(METHODS[name])
    bucket = torch.zeros(size, device="cuda")
    memory = torch.zeros(kernels.group.numel, device="cuda")
    update = torch.zeros_like(bucket)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        payload = kernels.encode(bucket, memory, memory, None)
        kernels.decode(payload[None], update)
    memory.zero_()
    expected_memory, expected = memory.clone(), torch.zeros_like(update)
    for step in range(4):
        generator = torch.Generator(device="cuda").manual_seed(step)
        bucket.copy_(torch.randn(size, device="cuda", generator=generator))
        graph.replay()
        sent = kernels.encode(bucket, expected_memory, expected_memory, None)
        kernels.decode(sent[None], expected)
        assert torch.equal(payload, sent)
        assert torch.equal(memory, expected_memory)
        assert torch.equal(update, expected)
        assert not bool(kernels.wrong)
