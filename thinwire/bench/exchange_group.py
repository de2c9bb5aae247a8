"""Exchanges timed on a real process group: gloo processes on this machine, or the group that torchrun made."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from thinwire.bench.exchange_cases import Case, Worker, find_cases, make_gradient, make_group
from thinwire.compressor import Opened
from thinwire.exchange.base import Outcome
from thinwire.exchange.network import Network
from thinwire.observe.ledger import Ledger


def measure_group(
    names: str, ranks: int, sizes: Sequence[int], density: float, values: str, iters: int
) -> list[dict[str, Any]]:
    """Rows of rank 0. Under torchrun this process is one of the ranks; otherwise `ranks` processes are started."""
    settings = (names, list(sizes), density, values, iters)
    if "RANK" in os.environ:
        return _run_rank(*settings)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_start_rank, (ranks, folder, settings), nprocs=ranks)
        return torch.load(Path(folder) / "rows.pt", weights_only=True)


def _start_rank(rank: int, world: int, folder: str, settings: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    rows = _measure_all(torch.device("cpu"), *settings)
    if rank == 0:
        torch.save(rows, Path(folder) / "rows.pt")
    dist.destroy_process_group()


def _run_rank(*settings: Any) -> list[dict[str, Any]]:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rows = _measure_all(device or torch.device("cpu"), *settings)
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rows if rank == 0 else []


def _measure_all(
    device: torch.device,
    names: str,
    sizes: Sequence[int],
    density: float,
    values: str,
    iters: int,
) -> list[dict[str, Any]]:
    return [
        measure_case(case, numel, density, values, iters, device)
        for numel in sizes
        for case in find_cases(names)
    ]


def measure_case(
    case: Case, numel: int, density: float, values: str, iters: int, device: torch.device
) -> dict[str, Any]:
    """One row in the columns of nccl-tests, and what sparse exchanges add to them."""
    group = dist.group.WORLD
    assert group is not None
    ledger = Ledger(dist.get_world_size(group))
    network = Network(group, ledger)
    place = network.place
    worker = Worker(case.make(density, values), make_group(numel, device), place)
    gradient = make_gradient(numel, place.rank, 0, device)
    mean = gradient.clone()
    dist.all_reduce(mean)
    mean /= place.world
    first = _timed(worker.open(gradient.clone()), network, device)
    error = float((first.update - mean).norm() / mean.norm())
    wrong = _count_wrong(first.update)
    before = ledger.total()
    runs = []
    for step in range(1, iters + 1):
        gradient = make_gradient(numel, place.rank, step, device)
        dist.barrier()
        began = time.perf_counter()
        runs.append(_timed(worker.open(gradient), network, device, began))
    after = ledger.total()
    seconds = statistics.median(run.total for run in runs)
    size = numel * gradient.element_size()
    wire = (after.sent_bytes - before.sent_bytes) / iters
    dense = 2 * size * (place.world - 1) / place.world
    return {
        "method": case.name,
        "ranks": place.world,
        "size": size,
        "count": numel,
        "type": str(gradient.dtype).removeprefix("torch."),
        "time_us": 1e6 * seconds,
        "algbw": size / seconds / 1e9,
        "busbw": dense / seconds / 1e9,
        "wrong": wrong,
        "wire_bytes": wire,
        "ratio": dense / wire if wire else 1.0,
        "encode_us": 1e6 * statistics.median(run.encode for run in runs),
        "exchange_us": 1e6 * statistics.median(run.exchange for run in runs),
        "decode_us": 1e6 * statistics.median(run.decode for run in runs),
        "error": error,
        "device": device.type,
        "backend": dist.get_backend(group),
    }


class _timed:
    """Run one opened program to its end and keep where the time went.

    encode: up to the first request; exchange: in collectives; decode: the rest.
    """

    def __init__(
        self, opened: Opened, network: Network, device: torch.device, began: float | None = None
    ) -> None:
        start = time.perf_counter() if began is None else began
        self.exchange = 0.0
        outcome: Outcome
        try:
            batch = next(opened.program)
            _wait(device)
            self.encode = time.perf_counter() - start
            while True:
                sent = time.perf_counter()
                replies = network.perform(batch)
                _wait(device)
                self.exchange += time.perf_counter() - sent
                batch = opened.program.send(replies)
        except StopIteration as finished:
            outcome = finished.value
        _wait(device)
        self.total = time.perf_counter() - start
        self.decode = self.total - self.encode - self.exchange
        self.update = outcome.update
        if opened.account is not None:
            opened.account.settle(torch.zeros((), dtype=torch.bool, device=device))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _count_wrong(update: Tensor) -> int:
    """Elements whose bits are not the same on all ranks."""
    bits = update.float().view(torch.int32)
    lowest, highest = bits.clone(), bits.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return int((lowest != highest).sum())
