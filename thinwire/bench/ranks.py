"""Ranks for a benchmark of collectives: gloo processes on this machine, or the group that torchrun made."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from thinwire.tools.processes import loopback

Rows = list[dict[str, Any]]
Job = Callable[..., Rows]


def run_ranks(job: Job, ranks: int, *settings: Any) -> Rows:
    """job(device, *settings) on every rank; the rows of rank 0, none on the others.

    Under torchrun this process is one of the ranks. Otherwise `ranks` processes are started: `job` must be a function at
    the top of its module.
    """
    if "RANK" in os.environ:
        return _join(job, settings)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_start, (ranks, folder, job, settings), nprocs=ranks)
        return torch.load(Path(folder) / "rows.pt", weights_only=True)


def _start(rank: int, world: int, folder: str, job: Job, settings: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= loopback()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    rows = job(torch.device("cpu"), *settings)
    if rank == 0:
        torch.save(rows, Path(folder) / "rows.pt")
    dist.destroy_process_group()


def _join(job: Job, settings: tuple[Any, ...]) -> Rows:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rows = job(device or torch.device("cpu"), *settings)
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rows if rank == 0 else []
