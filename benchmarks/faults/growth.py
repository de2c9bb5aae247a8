"""Growth: memory, threads and descriptors of a process after thousands of steps, and after hundreds of handles."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from faults.batches import METHODS, WORLD, batch, make_model
from faults.groups import run_group
from faults.parts import Tally

STEPS_AT_ONCE = 500
HANDLES_AT_ONCE = 40
WARM_UP = 60
"""Steps or handles, after which everything that is kept for good is there."""
LOOKS = 10
"""At a process, a tenth of a second apart."""
NOISE_MB = 4.0
"""What the allocator may hold more or less of."""
Size = tuple[float, int, int]
"""Resident MB, threads, descriptors."""


def run_steps(first: int, last: int, folder: Path) -> Iterator[Tally]:
    for begin in range(first, last, STEPS_AT_ONCE):
        count = min(STEPS_AT_ONCE, last - begin)
        name = list(METHODS)[begin // STEPS_AT_ONCE % len(METHODS)]
        yield grown(count, run_group(WORLD, step_often, name, count))


def run_handles(first: int, last: int, folder: Path) -> Iterator[Tally]:
    yield from attach_in_groups(first, last, closed=True)


def run_dropped(first: int, last: int, folder: Path) -> Iterator[Tally]:
    yield from attach_in_groups(first, last, closed=False)


def attach_in_groups(first: int, last: int, closed: bool) -> Iterator[Tally]:
    for begin in range(first, last, HANDLES_AT_ONCE):
        count = min(HANDLES_AT_ONCE, last - begin)
        yield grown(count, run_group(WORLD, attach_often, count, closed))


def grown(count: int, sizes: list[tuple[Size, Size]]) -> Tally:
    more = [[now - then for then, now in zip(*pair, strict=True)] for pair in sizes]
    memory = max(one[0] for one in more)
    return {
        "units": count,
        "memory grown": float(memory > NOISE_MB),
        "threads more": max(0, *(one[1] for one in more)),
        "descriptors more": max(0, *(one[2] for one in more)),
        "most MB more": round(max(memory, 0), 2),
    }


def size() -> Size:
    """When it has settled: threads end a moment after their owners."""
    looks = [look() for _ in range(LOOKS)]
    return min(one[0] for one in looks), min(one[1] for one in looks), min(one[2] for one in looks)


def look() -> Size:
    gc.collect()
    time.sleep(0.1)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return (
        resident,
        len(list(Path("/proc/self/task").iterdir())),
        len(list(Path("/proc/self/fd").iterdir())),
    )


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        x = batch(0, step, rank)
        (ddp(x) - x.flip(1)).square().mean().backward()
        optimizer.step()


def step_often(rank: int, world: int, name: str, count: int) -> tuple[Size, Size]:
    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    handle = tw.attach(ddp, METHODS[name], optimizer=optimizer)
    train(ddp, optimizer, rank, WARM_UP)
    before = size()
    train(ddp, optimizer, rank, count)
    after = size()
    handle.close()
    return before, after


def attach_often(rank: int, world: int, count: int, closed: bool) -> tuple[Size, Size]:
    model = make_model()
    names = list(METHODS)

    def once(number: int) -> None:
        """Attach, train, switch, train; then close it, or just forget it."""
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        handle = tw.attach(ddp, METHODS[names[number % 2]], optimizer=optimizer)
        train(ddp, optimizer, rank, 2)
        handle.switch(METHODS[names[(number + 1) % 2]] if number % 4 else tw.Dense())
        train(ddp, optimizer, rank, 2)
        if closed:
            handle.close()

    for number in range(WARM_UP // 4):
        once(number)
    before = size()
    for number in range(count):
        once(number)
    return before, size()
