"""A compiled training step: torch.compile takes the model's code and leaves ours alone, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.models import fingerprint
from thinwire.methods.base import Method

STEPS = 4


class Graphs:
    """A backend that runs what it is given, and counts how many of its operations come from where."""

    def __init__(self) -> None:
        self.of_model = 0
        self.of_thinwire = 0

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            source = node.stack_trace or ""
            self.of_thinwire += "/thinwire/adapters/" in source or "/thinwire/pipeline.py" in source
            self.of_model += "test_compile.py" in source
        return graph.forward


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(64, 96)
        self.outer = nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu())


def train(rank: int, face: str, method: Method, backend: Graphs | None) -> bytes:
    """Fingerprint after STEPS steps, each compiled as a whole if there is a backend."""
    torch._dynamo.reset()
    model = Net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if face == "attach":
        ddp = DistributedDataParallel(model, bucket_cap_mb=1)
        handle, optimizer, forward = tw.attach(ddp, method, optimizer=plain), plain, ddp
    else:
        optimizer = tw.DistributedOptimizer(plain, model=model, method=method, bucket_mb=0.01)
        handle, forward = optimizer.handle, model

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        (forward(x) - x).square().mean().backward()
        optimizer.step()

    run = step if backend is None else torch.compile(step, backend=backend)
    data = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        run(torch.randn(16, 64, generator=data))
    assert handle.stats().steps == STEPS
    handle.close()
    return fingerprint(model)


def compiled_job(
    rank: int, world: int, face: str, method: Method, autograd: bool
) -> tuple[bytes, bytes]:
    graphs = Graphs()
    eager = train(rank, face, method, None)
    with torch._dynamo.config.patch(compiled_autograd=autograd):
        compiled = train(rank, face, method, graphs)
    assert graphs.of_model > 0 == graphs.of_thinwire
    return eager, compiled


SPARSE, WITH_MOMENTUM = tw.ADTopK(density=0.1), tw.DGC(density=0.1)


@pytest.mark.parametrize(
    ("face", "method", "autograd"),
    [
        ("attach", SPARSE, False),
        ("attach", WITH_MOMENTUM, False),
        ("optimizer", WITH_MOMENTUM, False),
        ("optimizer", SPARSE, True),
    ],
)
def test_a_compiled_step_has_the_bits_of_an_eager_one(pools, face, method, autograd):
    results = pools(2).run(compiled_job, face, method, autograd)
    assert len({part for pair in results for part in pair}) == 1
