"""Whole training steps in which the host may not wait for the device, for every method that promises it.

    thinwire lab --hosts 4 --rate 10gbit --share-gpu --mps -- python -m tests.gpu.sync_free --out verdicts.json
    torchrun --nproc-per-node 1 -m tests.gpu.sync_free adtopk

Under `torch.cuda.set_sync_debug_mode("error")` anything that makes the host wait raises. The first steps are free: DDP
changes its buckets, tables are made, kernels are compiled. Without a GPU the same steps run unwatched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.gpu.seats import Check, Seat, Skip, make_method, run_script
from tests.models import batches, make_cnn
from thinwire.tools.methods import METHODS

LEAST_WARMUP = 3
WATCHED_STEPS = 8
BUCKET_KB = 20


def check_ddp(seat: Seat, name: str) -> str:
    model = make_cnn().to(seat.device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_KB / 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    handle = tw.attach(ddp, promised(name), optimizer=optimizer)
    return watch_steps(seat, name, ddp, optimizer, handle)


def check_optimizer(seat: Seat, name: str) -> str:
    model = make_cnn().to(seat.device)
    plain = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    optimizer = tw.DistributedOptimizer(
        plain, model=model, method=promised(name), bucket_mb=BUCKET_KB / 1024
    )
    return watch_steps(seat, name, model, optimizer, optimizer.handle)


def promised(name: str) -> Any:
    method = make_method(name)
    if not method.host_sync_free:
        raise Skip("it does not promise to be free of host waits")
    return method


def watch_steps(
    seat: Seat, name: str, module: nn.Module, optimizer: torch.optim.Optimizer, handle: tw.Handle
) -> str:
    # Some exchanges go round the ranks, with tables of their own for every turn.
    warmup = max(LEAST_WARMUP, seat.world + 1)
    data = [to_device(batch, seat) for batch in batches(seat.rank, warmup + WATCHED_STEPS)]
    seat.wait()
    for step, (images, labels) in enumerate(data):
        if step == warmup and seat.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(images), labels).backward()
        optimizer.step()
    if seat.device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    handle.close()
    return f"{WATCHED_STEPS} steps after {warmup}"


def to_device(batch: tuple[Tensor, Tensor], seat: Seat) -> tuple[Tensor, Tensor]:
    images, labels = batch
    return images.to(seat.device), labels.to(seat.device)


CHECKS: dict[str, Check] = {"ddp": check_ddp, "optimizer": check_optimizer}

if __name__ == "__main__":
    run_script(
        "Steps without host waits, for every method that promises them.", CHECKS, list(METHODS)
    )
