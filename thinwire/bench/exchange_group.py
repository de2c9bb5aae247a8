"""Exchanges timed on a real process group: gloo processes on this machine, or the group that torchrun made."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.bench.exchange_cases import (
    ExchangeCase,
    ExchangePlan,
    Worker,
    make_gradient,
    make_group,
    run_name,
)
from thinwire.compress import Opened
from thinwire.engine import Network
from thinwire.exchange import Outcome
from thinwire.observe import Ledger
from thinwire.tools.clock import wait_for
from thinwire.tools.traffic import Line, ledger_lines, write_lines


def measure_group(
    device: torch.device, measured: ExchangePlan, ledger: Path | None = None
) -> list[dict[str, Any]]:
    """A row of every case on the default group, and every rank's traffic in the file `ledger`."""
    traffic: list[Line] = []
    rows = [
        measure_case(case, numel, measured, device, traffic)
        for numel in measured.count
        for case in measured.cases()
    ]
    if ledger is not None:
        # The other ranks may be on other machines.
        everybodys: list[list[Line]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everybodys, traffic)
        if dist.get_rank() == 0:
            write_lines(ledger, [line for lines in everybodys for line in lines])
    return rows


def measure_case(
    case: ExchangeCase,
    numel: int,
    measured: ExchangePlan,
    device: torch.device,
    traffic: list[Line],
) -> dict[str, Any]:
    """One row in the columns of nccl-tests, and what sparse exchanges add to them.

    `traffic` gets this rank's ledger of the measured steps.
    """
    group = dist.group.WORLD
    assert group is not None
    network = Network(group, Ledger(dist.get_world_size(group)))
    place = network.place
    worker = Worker(case.make(measured), make_group(numel, device), place)
    gradient = make_gradient(numel, place.rank, 0, device)
    mean = gradient.clone()
    dist.all_reduce(mean)
    mean /= place.world
    first = _timed(worker.open(gradient.clone()), network, device)
    error = float((first.update - mean).norm() / mean.norm())
    wrong = _count_wrong(first.update)
    # The first step warms up and is not counted.
    network.ledger = Ledger(place.world)
    runs = []
    for step in range(1, measured.iters + 1):
        gradient = make_gradient(numel, place.rank, step, device)
        dist.barrier()
        began = time.perf_counter()
        runs.append(_timed(worker.open(gradient), network, device, began))
    traffic += ledger_lines(run_name(case.name, numel, place.world), place.rank, network.ledger)
    seconds = statistics.median(run.total for run in runs)
    size = numel * gradient.element_size()
    wire = network.ledger.sent_bytes() / measured.iters
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
            wait_for(device)
            self.encode = time.perf_counter() - start
            while True:
                sent = time.perf_counter()
                replies = network.perform(batch)
                wait_for(device)
                self.exchange += time.perf_counter() - sent
                batch = opened.program.send(replies)
        except StopIteration as finished:
            outcome = finished.value
        wait_for(device)
        self.total = time.perf_counter() - start
        self.decode = self.total - self.encode - self.exchange
        self.update = outcome.update
        if opened.account is not None:
            opened.account.settle(torch.zeros((), dtype=torch.bool, device=device))


def _count_wrong(update: Tensor) -> int:
    """Elements whose bits are not the same on all ranks."""
    bits = update.float().view(torch.int32)
    lowest, highest = bits.clone(), bits.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return int((lowest != highest).sum())
