"""A small job for torchrun that saves snapshots and dies once: `python -m tests.elastic_job FOLDER STEPS KILL_AT`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.models import batches, fingerprint, make_cnn


def run_steps(folder: str, steps: int, kill_at: int = 0) -> tuple[bytes, int]:
    """(the parameters' bits after all steps, the step that it went on from). The last rank dies after `kill_at` steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(make_cnn())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    handle = tw.attach(ddp, tw.ADTopK(density=0.05), deterministic=True)
    snapshots = tw.elastic.Snapshots(folder)
    began = step = snapshots.resume(handle, model=ddp, optimizer=optimizer)
    data = list(batches(rank, steps))
    while step < steps:
        images, labels = data[step]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(ddp(images), labels).backward()
        optimizer.step()
        step += 1
        if step == kill_at and rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 5 == 0:
            snapshots.save(step, handle, model=ddp, optimizer=optimizer)
    return fingerprint(ddp), began


def main(folder: str, steps: int, kill_at: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    bits, began = run_steps(folder, steps, kill_at if first_life else 0)
    if dist.get_rank() == 0:
        Path(folder, f"end{dist.get_world_size()}-from{began}").write_bytes(bits)
    dist.barrier()
    sys.stdout.flush()
    # Gloo's threads can abort while the interpreter shuts down.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
