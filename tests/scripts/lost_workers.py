"""Ranks that are killed, under every adapter: what the others say, as one line of JSON per case.

Every case is a group of processes forked from this one, which has imported everything: optimizers import torch's compiler, in every
process that has not.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
import thinwire.horovod as hvd
from tests import sharded
from thinwire.tools.processes import loopback

METHOD = tw.TopK(density=0.1, dense_fallback=False)
VICTIM = 1


def die() -> None:
    """When all others are past the start, which is torch's."""
    while len(list(Path(os.environ["STARTED"]).glob("started*"))) < dist.get_world_size():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(6):
        if step == 3 and dist.get_rank() == VICTIM:
            die()
        optimizer.zero_grad()
        model(torch.randn(8, 24)).square().mean().backward()
        optimizer.step()


def under_ddp() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ddp = DistributedDataParallel(model)
    tw.attach(ddp, METHOD, optimizer=optimizer)
    train(ddp, optimizer)


def under_optimizer() -> None:
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, tw.DistributedOptimizer(plain, model=model, method=METHOD))


def under_local_steps(delay: int = 0) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tw.LocalSteps(model, optimizer, tw.Quantized(bits=4), every=2, delay=delay)
    train(model, optimizer)


def under_fsdp() -> None:
    """The victim's shard has been summed by torch; it dies where ours begins."""
    model = sharded.make_model(sharded.make_mesh(2, 2))
    handle = tw.attach(model, METHOD)
    optimizer = sharded.train(model, 2)
    if dist.get_rank() == VICTIM:
        handle.reducer.driver.network.perform = lambda *_: die()
    sharded.train(model, 2, optimizer=optimizer)


def under_horovod() -> None:
    hvd.init()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()))


def without(collective: Callable[[], object]) -> Callable[[], None]:
    def job() -> None:
        hvd.init()
        if dist.get_rank() == VICTIM:
            die()
        collective()

    return job


def loading() -> None:
    handle = tw.attach(DistributedDataParallel(make_model()), METHOD)
    if dist.get_rank() == VICTIM:
        die()
    handle.load_state_dict(handle.state_dict())


CASES: dict[str, tuple[int, Callable[[], object]]] = {
    "DDP": (3, under_ddp),
    "DistributedOptimizer": (3, under_optimizer),
    "FSDP": (4, under_fsdp),
    "LocalSteps": (3, under_local_steps),
    "LocalSteps, delayed": (3, lambda: under_local_steps(delay=1)),
    "Horovod": (3, under_horovod),
    "hvd.allreduce": (3, without(lambda: hvd.allreduce(torch.ones(3)))),
    "hvd.allgather": (3, without(lambda: hvd.allgather(torch.ones(3)))),
    "hvd.allgather_object": (3, without(lambda: hvd.allgather_object("a"))),
    "hvd.broadcast_parameters": (
        3, without(lambda: hvd.broadcast_parameters(make_model().state_dict(), root_rank=VICTIM)),
    ),
    "load_state_dict": (3, loading),
}  # fmt: skip


def work(rank: int, world: int, folder: Path, job: Callable[[], object]) -> None:
    os.environ |= {**loopback(), "STARTED": str(folder)}
    address = f"file://{folder}/store"
    patience = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=world, timeout=patience
    )
    (folder / f"started{rank}").touch()
    try:
        job()
        said = "nothing"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    (folder / str(rank)).write_text(said)


def main() -> None:
    torch.set_num_threads(1)
    for name, (world, job) in CASES.items():
        with tempfile.TemporaryDirectory() as scratch:
            children = []
            for rank in range(world):
                children.append(os.fork())
                if not children[-1]:
                    work(rank, world, Path(scratch), job)
                    os._exit(0)
            for child in children:
                os.waitpid(child, 0)
            others = [rank for rank in range(world) if rank != VICTIM]
            said = {rank: (Path(scratch) / str(rank)).read_text() for rank in others}
        print(json.dumps({"case": name, "world": world, "said": said}), flush=True)


if __name__ == "__main__":
    main()
