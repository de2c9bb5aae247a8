"""The library's selections and memories on CUDA: the entries of the CPU, and no wait on the host."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from tests.contracts.cluster import parameter
from tests.select.data import odd_tensors
from thinwire.bench.data import LAWS, draw
from thinwire.bench.selections import SELECTIONS
from thinwire.compress import GroupStep, Terms
from thinwire.engine.virtual import run_virtual
from thinwire.exchange.requests import Place
from thinwire.layout import BucketLayout, Group, RowTable
from thinwire.memory.clip import Clip
from thinwire.memory.momentum import MomentumCorrection
from thinwire.memory.residual import Residual
from thinwire.methods.base import DenseMomentum
from thinwire.methods.chunktopk import ChunkTopK
from thinwire.methods.dgc import DGC
from thinwire.methods.gaussiank import GaussianK
from thinwire.methods.quantized import Quantized
from thinwire.methods.randomk import RandomK
from thinwire.methods.redsync import RedSync
from thinwire.methods.sidco import SIDCo
from thinwire.methods.signsgd import SignSGD
from thinwire.methods.threshold import Threshold

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

METHODS = [
    DGC(memory=MomentumCorrection(0.9, True)),
    DGC(memory=MomentumCorrection(0.9, True), clip=Clip(norm=1.0), sample_ratio=0.01),
    DGC(memory=MomentumCorrection(0.9, False, storage="int8"), clip=Clip(value=1.0)),
    GaussianK(),
    RedSync(),
    RedSync(trimmed=True),
    SIDCo(),
    SIDCo(distribution="gamma"),
    RandomK(),
    RandomK(values="fp32"),
    Threshold(threshold=1.0),
    ChunkTopK(),
    SignSGD(),
    SignSGD(memory=Residual()),
    Quantized(bits=4),
    Quantized(bits=1, rounding="stochastic", memory=Residual(storage="int8")),
    Quantized(bits="fp8", rounding="stochastic"),
    GaussianK(memory=Residual(storage="bf16")),
    DenseMomentum(momentum=0.9, nesterov=True),
]


@contextmanager
def no_waiting():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def pick(selector, x):
    table = RowTable([selector.rows(parameter("w", x.shape).slot(0), None)], x.numel())
    picks = selector.session().pick(x, table)
    count = int(picks.counts[0]) if picks.counts is not None else table.entries
    return picks.indices[:count].cpu(), count


@pytest.mark.parametrize("name", [n for n in SELECTIONS if n != "RandomK"])
def test_cuda_chooses_what_the_cpu_chooses(name):
    odd = {n: x for n, x in odd_tensors().items() if n not in ("tiny", "huge")}
    if "gamma" in name:
        # No spread, no fit: its moments cancel to what rounding leaves, which differs between devices.
        del odd["constant"]
    for case, x in {**{law: draw(law, 300_000) for law in LAWS}, **odd}.items():
        here, count = pick(SELECTIONS[name](0.01), x)
        there, other = pick(SELECTIONS[name](0.01), x.cuda())
        # Sums in another order move a threshold by an ulp, and a threshold that moves may move an entry.
        assert abs(count - other) <= 2 + 0.01 * count, case
        shorter = min(count, other)
        if count == other:
            assert torch.equal(here, there), case
        else:
            assert len(set(here.tolist()) & set(there.tolist())) == shorter


@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{type(m).__name__}")
@pytest.mark.parametrize("world", [1, 3])
def test_steps_do_not_wait_for_the_device(method, world):
    device = torch.device("cuda")
    if hasattr(method, "dense_fallback"):
        method = replace(method, dense_fallback=False)
    slots, offset = [], 0
    for name, shape in {"a": (64, 500), "b": (33, 70)}.items():
        slots.append(parameter(name, shape).slot(offset))
        offset += slots[-1].numel
    compressors = [method.compressor() for _ in range(world)]
    groups = []
    for _ in range(world):
        layout = BucketLayout(tuple(slots), offset, torch.float32, device)
        groups.append(Group.of(layout, slots, torch.float32))
    flats = [torch.randn(offset, device=device) for _ in range(world)]
    good = torch.zeros((), dtype=torch.bool, device=device)
    # Not aligned: the parts themselves are tested here.
    plans = [
        one.plan(groups[rank], Terms(Place(rank, world), torch.float32, aligned=False))
        for rank, one in enumerate(compressors)
    ]
    routes = [{} for _ in plans]

    def open_(rank, counts):
        modes = plans[rank].begin(counts)
        if modes not in routes[rank]:
            routes[rank][modes] = plans[rank].route(modes)
        return routes[rank][modes].open(GroupStep(flats[rank], counts, None))

    def step(count):
        opened = [open_(rank, [count] * 2) for rank in range(world)]
        outcomes = run_virtual([one.program for one in opened])
        for one in opened:
            if one.account is not None:
                one.account.settle(good)
        return outcomes

    step(0)
    step(1)
    with no_waiting():
        outcomes = step(2)
    assert method.host_sync_free
    assert all(torch.equal(o.update, outcomes[0].update) for o in outcomes)
    assert outcomes[0].update.isfinite().all() and outcomes[0].update.any()
