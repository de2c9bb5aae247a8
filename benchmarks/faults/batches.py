"""Bad batches: infinities that a GradScaler sees, and gradients a thousand times too large that the user's own rule skips.

Every second step is bad, so a bad step that came back from memory would cost the good one after it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from faults.groups import run_group
from faults.parts import Tally

WORLD = 2
CHUNK = 100
"""Bad steps of one group of processes."""
USUAL = 6
"""Good steps before the first bad one, from which the user's rule knows what is usual."""
SPARSE = {"density": 0.1, "dense_fallback": False}
METHODS = {
    "ADTopK": tw.ADTopK(**SPARSE),
    "TopK": tw.TopK(**SPARSE),
    "DGC": tw.DGC(**SPARSE),
    "OkTopK": tw.OkTopK(**SPARSE),
    "ACPSGD": tw.ACPSGD(rank=2, dense_fallback=False),
}


def run_infinities(first: int, last: int, folder: Path) -> Iterator[Tally]:
    yield from in_chunks(first, last, infinities)


def run_bad_batches(first: int, last: int, folder: Path) -> Iterator[Tally]:
    yield from in_chunks(first, last, bad_batches)


def in_chunks(first: int, last: int, job: Any) -> Iterator[Tally]:
    for begin in range(first, last, CHUNK):
        count = min(CHUNK, last - begin)
        name = list(METHODS)[begin // CHUNK % len(METHODS)]
        results = run_group(WORLD, job, name, begin, count)
        lost, finite, _ = results[0]
        yield {
            "units": count,
            "lost steps": lost,
            "steps lost beside": lost - count,
            "not finite": float(not finite),
            "replicas that differ": float(len({end for _, _, end in results}) > 1),
        }


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24))


def batch(seed: int, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(7919 * seed + 100 * step + rank)
    return torch.randn(16, 24, generator=generator)


def is_bad(step: int) -> bool:
    return step >= USUAL and (step - USUAL) % 2 == 0


def infinities(rank: int, world: int, name: str, seed: int, count: int) -> tuple[int, bool, str]:
    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    handle = tw.attach(ddp, METHODS[name], optimizer=optimizer, grad_scaler=scaler)
    applied: list[int] = []
    optimizer.register_step_post_hook(lambda *_: applied.append(1))
    steps = USUAL + 2 * count
    for step in range(steps):
        optimizer.zero_grad()
        x = batch(seed, step, rank)
        loss = (ddp(x) - x.flip(1)).square().mean()
        if is_bad(step) and rank == step % world:
            poison = math.inf if step % 4 < 2 else 3e38
            loss = 1e6 * loss + poison * model[2].weight[0, 0] + poison * model[0].bias[1]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    handle.close()
    return steps - len(applied), is_finite(model), fingerprint(model)


def bad_batches(rank: int, world: int, name: str, seed: int, count: int) -> tuple[int, bool, str]:
    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    handle = tw.attach(ddp, METHODS[name], optimizer=optimizer, skippable=True)
    usual: list[float] = []
    lost = 0
    for step in range(USUAL + 2 * count):
        optimizer.zero_grad()
        x = batch(seed, step, rank)
        loss = (ddp(x) - x.flip(1)).square().mean()
        (loss * (1000 if is_bad(step) and rank == step % world else 1)).backward()
        norm = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        if len(usual) >= USUAL and not norm < 50 * sorted(usual)[len(usual) // 2]:
            lost += 1
            handle.discard_step()
        else:
            usual.append(norm)
            optimizer.step()
    handle.close()
    return lost, is_finite(model), fingerprint(model)


def is_finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


def fingerprint(model: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()
