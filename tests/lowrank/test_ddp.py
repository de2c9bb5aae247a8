"""Low-rank methods behind DDP, on real gloo groups."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.lanes import slow
from tests.models import batches, fingerprint, make_cnn, train
from thinwire.methods.acpsgd import ACPSGD
from thinwire.methods.base import Method
from thinwire.methods.powersgd import PowerSGD

METHODS = [PowerSGD(rank=2, min_compression_rate=1.0), ACPSGD(rank=2, min_compression_rate=1.0)]
each_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)


class Odd(nn.Module):
    """Everything a hook meets: many layers, a scalar, an empty and an unused parameter, experts, channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3, padding=1).to(memory_format=torch.channels_last)
        self.deep = nn.Conv2d(12, 12, 3, padding=1).to(memory_format=torch.channels_last)
        self.layers = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(12))
        self.enter = nn.Linear(12 * 64, 24)
        self.experts = nn.Parameter(torch.randn(3, 24, 16) / 5)
        self.leave = nn.Linear(16, 10)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.unused = nn.Linear(24, 24)

    def forward(self, images: Tensor) -> Tensor:
        x = self.deep(self.conv(images).relu()).relu().flatten(1)
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x).tanh() / 4
        x = torch.einsum("bi,eio->bo", x, self.experts)
        return self.leave(x.tanh()) * self.scale


def make_odd() -> nn.Module:
    torch.manual_seed(0)
    return Odd()


def replicas_job(rank: int, world: int, steps: int) -> tuple[bytes, int, dict[str, str]]:
    torch.manual_seed(rank)
    two_phase, alternating = METHODS
    ddp = DistributedDataParallel(make_odd(), bucket_cap_mb=0.002, find_unused_parameters=True)
    handle = tw.attach(ddp, two_phase, policy=[tw.rule("layers.*", method=alternating)])
    handle.reducer.coalesce_bytes = 0
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    train(ddp, optimizer, batches(rank, steps - 2))
    before = count_buckets(handle)
    train(ddp, optimizer, batches(rank, 2, seed=1))
    buckets = (count_buckets(handle) - before) // 2
    actions = {row.info.name: row.action for row in handle.plan()}
    assert all(p.isfinite().all() for p in ddp.parameters())
    handle.close()
    return fingerprint(ddp), buckets, actions


def count_buckets(handle: tw.Handle) -> int:
    """How many have travelled: each begins with one collective, and PowerSGD's take a second one."""
    rows = handle.ledger.rows().items()
    return sum(row.messages for (phase, _), row in rows if phase != "lowrank/q")


@pytest.mark.parametrize("steps", [40, slow(150)])
def test_replicas_stay_bit_identical(pools, steps):
    """From step 0 on, more than 16 buckets, both methods in one model."""
    results = pools(3).run(replicas_job, steps)
    assert len({result[0] for result in results}) == 1
    _, buckets, actions = results[0]
    assert buckets >= 16
    assert actions["scale"] == "dense" and actions["empty"] == "nothing to send"
    assert "3 x 24 x 16" in actions["experts"]
    assert "rank 2 of 12 x 108" in actions["deep.weight"]


def one_collective_job(rank: int, world: int, method: Method) -> dict[str, int]:
    model = nn.Sequential(nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False))
    ddp = DistributedDataParallel(model)
    handle = tw.attach(ddp, method)
    for _ in range(4):
        ddp(torch.randn(3, 40)).square().mean().backward()
    rows = {phase: row.messages for (phase, _), row in handle.ledger.rows().items()}
    stats = handle.stats()
    assert stats.ratio > 2
    handle.close()
    return rows


def test_collectives_per_bucket(pools):
    assert pools(3).run(one_collective_job, ACPSGD(rank=4))[0] == {"lowrank": 4}
    assert pools(3).run(one_collective_job, PowerSGD(rank=4))[0] == {"lowrank/p": 4, "lowrank/q": 4}


def scaler_job(rank: int, world: int, method: Method) -> tuple[list[float], bytes]:
    ddp = DistributedDataParallel(make_cnn(), bucket_cap_mb=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    handle = tw.attach(ddp, method, grad_scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scales = []
    held = []
    for step, (images, labels) in enumerate(batches(rank, 10)):
        if step == 4 and rank == 1:
            images[0, 0, 0, 0] = float("inf")
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        held.append(handle.residual("6.weight").norm().item())
    assert all(torch.tensor(held).isfinite())
    # Unscaled units: a growth of the scale by 2 leaves what is held back of the same size.
    assert max(held) < 3 * (min(held) + 1e-3)
    handle.close()
    return scales, fingerprint(ddp)


@each_method
def test_an_inf_on_one_rank_costs_one_step(pools, method):
    results = pools(3).run(scaler_job, method)
    assert len({result[1] for result in results}) == 1
    scales = results[0][0]
    assert [after < before for before, after in zip([1024.0, *scales], scales)].count(True) == 1  # noqa: B905
    assert scales[-1] >= 1024


def resume_job(rank: int, world: int, method: Method, folder: str) -> bool:
    def start(cap: float) -> tuple[DistributedDataParallel, tw.Handle, torch.optim.Optimizer]:
        ddp = DistributedDataParallel(make_cnn(), bucket_cap_mb=cap)
        handle = tw.attach(ddp, method, deterministic=True)
        return ddp, handle, torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)

    data = list(batches(rank, 12))
    whole, handle, optimizer = start(0.02)
    train(whole, optimizer, iter(data[:6]))
    state = handle.state_dict()
    file = Path(folder) / f"{rank}.pt"
    torch.save((whole.module.state_dict(), optimizer.state_dict(), state), file)
    dcp.save({"handle": handle}, checkpoint_id=f"{folder}/dcp")
    train(whole, optimizer, iter(data[6:]))
    handle.close()
    same = []
    for way in ("state_dict", "stateful", "checkpoint"):
        resumed, handle, optimizer = start(25)
        weights, momentum, state = torch.load(file, weights_only=True)
        resumed.module.load_state_dict(weights)
        optimizer.load_state_dict(momentum)
        if way == "state_dict":
            handle.load_state_dict(state)
        elif way == "stateful":
            dcp.load({"handle": handle}, checkpoint_id=f"{folder}/dcp")
        else:
            handle.load_checkpoint(f"{folder}/dcp")
        train(resumed, optimizer, iter(data[6:]))
        same.append(fingerprint(resumed) == fingerprint(whole))
        handle.close()
    return same


@each_method
def test_resume_with_another_bucketing_is_bit_exact(pools, method, tmp_path):
    for same in pools(3).run(resume_job, method, str(tmp_path)):
        assert same == [True, True, True]


def accumulate_job(rank: int, world: int, method: Method) -> float:
    """Under no_sync nothing is sent; switching to dense sends what was held back; bfloat16 gradients work."""
    ddp = DistributedDataParallel(make_cnn().to(torch.bfloat16), gradient_as_bucket_view=True)
    handle = tw.attach(ddp, method)
    for micro, (images, labels) in enumerate(batches(rank, 6)):
        last = micro % 2 == 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            nn.functional.cross_entropy(ddp(images.bfloat16()).float(), labels).backward()
        if last:
            ddp.zero_grad()
    assert handle.stats().steps == 3
    assert handle.residual("6.weight").any()
    handle.switch(tw.Dense())
    for images, labels in batches(rank, 2, seed=1):
        nn.functional.cross_entropy(ddp(images.bfloat16()).float(), labels).backward()
        ddp.zero_grad()
    left = handle.residual("6.weight").abs().max().item()
    handle.switch(tw.TopK(density=0.1))
    handle.switch(method)
    handle.close()
    return left


@each_method
def test_accumulation_and_switching(pools, method):
    assert pools(3).run(accumulate_job, method) == [0.0] * 3
