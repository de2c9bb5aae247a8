"""A compiled training step: torch.compile takes the model's code and leaves ours alone, and nothing else changes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import thinwire as tw
from tests.lanes import slow
from tests.models import fingerprint
from thinwire.errors import UsageError
from thinwire.handle import Handle
from thinwire.methods.base import Method

STEPS = 4
# Its full path: a clone's own folder, with tests and .venv inside, is usually named thinwire too.
PACKAGE = f"{Path(tw.__file__).parent}{os.sep}"


class Graphs:
    """A backend that runs what it is given, and counts how many of its operations come from where."""

    def __init__(self) -> None:
        self.of_model = 0
        self.of_thinwire = 0

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            source = node.stack_trace or ""
            self.of_thinwire += PACKAGE in source
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


def begin(face: str, method: Method) -> tuple[nn.Module, nn.Module, Optimizer, Handle]:
    """(model, what to call, optimizer, handle)"""
    torch._dynamo.reset()
    model = Net()
    # Left to itself torch 2.11 chooses other kernels in a compiled step than in an eager one.
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    if face == "attach":
        ddp = DistributedDataParallel(model, bucket_cap_mb=1)
        return model, ddp, plain, tw.attach(ddp, method, optimizer=plain)
    optimizer = tw.DistributedOptimizer(plain, model=model, method=method, bucket_mb=0.01)
    return model, model, optimizer, optimizer.handle


def train(rank: int, face: str, method: Method, backend: Graphs | None) -> bytes:
    """Fingerprint after STEPS steps, each compiled as a whole if there is a backend."""
    model, forward, optimizer, handle = begin(face, method)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        (forward(x) - x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=True)
        optimizer.step()
        handle.stats()

    run = step if backend is None else torch.compile(step, backend=backend)
    data = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        run(torch.randn(16, 64, generator=data))
    assert handle.stats().steps == STEPS
    handle.close()
    return fingerprint(model)


def compiled_job(rank: int, world: int, face: str, method: Method) -> tuple[bytes, bytes]:
    graphs = Graphs()
    eager = train(rank, face, method, None)
    compiled = train(rank, face, method, graphs)
    assert graphs.of_model > 0 == graphs.of_thinwire
    return eager, compiled


SPARSE, WITH_MOMENTUM = tw.ADTopK(density=0.1), tw.DGC(density=0.1)


@pytest.mark.parametrize(
    ("face", "method"),
    [("attach", SPARSE), slow("attach", WITH_MOMENTUM), ("optimizer", WITH_MOMENTUM)],
)
def test_a_compiled_step_has_the_bits_of_an_eager_one(pools, face, method):
    results = pools(2).run(compiled_job, face, method)
    assert len({part for pair in results for part in pair}) == 1


def compiled_autograd_job(rank: int, world: int) -> str:
    _, forward, optimizer, handle = begin("optimizer", SPARSE)

    def step(x: Tensor) -> None:
        forward(x).square().mean().backward()

    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(UsageError) as refused,
    ):
        torch.compile(step, backend="eager")(torch.ones(16, 64))
    # The same optimizer goes on without it.
    optimizer.zero_grad()
    step(torch.ones(16, 64))
    optimizer.step()
    assert handle.stats().steps == 1
    handle.close()
    return str(refused.value)


def test_compiled_autograd_is_refused(pools):
    """It drops the callback at the end of a backward: gradients would be averaged after clipping, or never."""
    assert "compiled_autograd is on" in pools(1).run(compiled_autograd_job)[0]


def test_importing_thinwire_does_not_import_the_compiler() -> None:
    code = "import sys, thinwire; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
