"""The multi-rank contracts on NCCL: several ranks, one GPU or many. Not collected by pytest; run it in the lab:

    thinwire lab --hosts 4 --rate 10gbit --share-gpu --mps -- python -m tests.gpu.contracts
    thinwire lab --hosts 4 --rate 10gbit --share-gpu --mps -- python -m tests.gpu.contracts adtopk topk

Every rank prints one line per method; the exit code is the number of broken contracts.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.models import batches, fingerprint, make_cnn

METHODS: dict[str, Callable[[], tw.Dense]] = {
    "dense": tw.Dense,
    "topk": lambda: tw.TopK(density=0.05),
    "adtopk": lambda: tw.ADTopK(density=0.05),
    "adtopk-fp32": lambda: tw.ADTopK(density=0.05, values="fp32", indices="int32"),
    "adtopk-interleave": lambda: tw.ADTopK(density=0.05, interleave=2),
    "adtopk-threshold": lambda: tw.ADTopK(density=0.05, interleave=2, threshold=True),
}
for name in ("RandomK", "ChunkTopK", "OkTopK", "GaussianK", "TopKA", "GTopK"):
    if hasattr(tw, name):
        METHODS[name.lower()] = lambda name=name: getattr(tw, name)(density=0.05)
for name in ("PowerSGD", "ACPSGD"):
    if hasattr(tw, name):
        METHODS[name.lower()] = lambda name=name: getattr(tw, name)(rank=4)


def run(
    method: tw.Dense, steps: int, *, rank: int, poison: int | None = None
) -> tuple[DistributedDataParallel, tw.Handle]:
    """Train; no host wait is allowed after the second step where the method promises that."""
    ddp = DistributedDataParallel(make_cnn().cuda(), bucket_cap_mb=0.02)
    handle = tw.attach(ddp, method)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step, (images, labels) in enumerate(batches(rank, steps)):
        images, labels = images.cuda(), labels.cuda()
        if step >= 4 and poison is None and method.host_sync_free:
            torch.cuda.set_sync_debug_mode("error")
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(images), labels)
        if step == poison and rank == 1:
            loss = loss * torch.inf
        loss.backward()
        if step != poison:
            optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
    return ddp, handle


def check_replicas(make: Callable[[], tw.Dense], rank: int) -> None:
    ddp, handle = run(make(), 30, rank=rank)
    torch.cuda.synchronize()
    prints: list[bytes | None] = [None] * dist.get_world_size()
    dist.all_gather_object(prints, fingerprint(ddp.cpu()))
    assert len(set(prints)) == 1, "replicas differ"
    assert handle.stats().steps == 30
    handle.close()


def check_bad_step(make: Callable[[], tw.Dense], rank: int) -> None:
    """A non-finite gradient on one rank is NaN on all, and nothing non-finite stays."""
    ddp, handle = run(make(), 6, rank=rank, poison=3)
    for name, parameter in ddp.module.named_parameters():
        assert parameter.isfinite().all(), f"{name} was poisoned"
        assert handle.residual(name).isfinite().all(), f"the residual of {name} was poisoned"
    handle.close()


def check_conservation(make: Callable[[], tw.Dense], rank: int) -> None:
    """Over all ranks and steps: world x sum of updates + sum of residuals = sum of gradients."""
    ddp = DistributedDataParallel(make_cnn().cuda(), bucket_cap_mb=0.02)
    handle = tw.attach(ddp, make())
    world = dist.get_world_size()
    local: dict[str, torch.Tensor] = {}
    updates: dict[str, torch.Tensor] = {}
    plain = make_cnn().cuda()
    for images, labels in batches(rank, 8):
        plain.zero_grad()
        nn.functional.cross_entropy(plain(images.cuda()), labels.cuda()).backward()
        ddp.zero_grad()
        nn.functional.cross_entropy(ddp(images.cuda()), labels.cuda()).backward()
        for (name, p), q in zip(plain.named_parameters(), ddp.parameters(), strict=True):
            local[name] = local.get(name, 0) + p.grad.double()
            updates[name] = updates.get(name, 0) + q.grad.double()
    for name, total in local.items():
        both = torch.stack([total, handle.residual(name).to(total.device).double()])
        dist.all_reduce(both)
        error = (world * updates[name] + both[1] - both[0]).abs().sum() / both[
            0
        ].abs().sum().clamp_min(1e-30)
        assert error < 1e-5, f"{name} lost {float(error):.2e} of its gradient"
    handle.close()


def main() -> int:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    broken = 0
    for name in sys.argv[1:] or METHODS:
        for check in (check_replicas, check_bad_step, check_conservation):
            torch.cuda.set_sync_debug_mode("default")
            try:
                check(METHODS[name], rank)
                verdict = "ok"
            except Exception:
                torch.cuda.set_sync_debug_mode("default")
                broken += 1
                verdict = "BROKEN\n" + "".join(
                    traceback.format_exc().splitlines(keepends=True)[-12:]
                )
            if rank == 0 or verdict != "ok":
                print(f"{name:20} {check.__name__:20} {verdict}", flush=True)
    return broken


if __name__ == "__main__":
    code = main()
    dist.barrier()
    sys.stdout.flush()
    os._exit(min(code, 100))
