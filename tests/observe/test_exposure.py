"""How long steps wait for nothing but the exchange."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.observe.clock import Mark
from thinwire.observe.exposure import EVERY, FIRST, ExposureClock

CPU = torch.device("cpu")


def take_step(clock: ExposureClock, step: int, waits: list[float]) -> list[Mark | None]:
    """Buckets that are ready one after the other, each delivered so many seconds later, all before the next is ready."""
    marks = []
    for seconds in waits:
        marks.append(clock.mark())
        deliver = clock.note(step, marks[-1])
        time.sleep(seconds)
        for call in deliver:
            call()
    return marks


def test_only_the_last_bucket_of_a_step_counts():
    clock = ExposureClock(CPU, wanted=True)
    marks = take_step(clock, 1, [0.0, 0.2])
    assert clock.milliseconds() >= 190
    (end,) = clock.ends
    assert end.ready is marks[-1] and end.delivered is not None


@pytest.mark.parametrize("buckets", [1, 2, 5])
def test_later_steps_are_looked_at_now_and_then(buckets):
    clock = ExposureClock(CPU, wanted=True)
    for step in range(1, FIRST + 4 * EVERY + 1):
        take_step(clock, step, [0.0] * buckets)
    whole = [end.step for end in clock.ends if end.ready is not None]
    assert len(whole) in (FIRST + 4, FIRST + 5) and whole[-1] >= FIRST + 3 * EVERY


def test_who_has_no_link_marks_nothing():
    clock = ExposureClock(CPU, wanted=False)
    take_step(clock, 1, [0.0])
    assert clock.milliseconds() is None and clock.mark() is None


def job(rank, world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    handle = tw.attach(ddp, tw.TopK(density=0.05))
    assert "exposed_ms" not in handle.stats().as_dict()
    for _ in range(4):
        ddp(torch.randn(8, 64)).square().mean().backward()
        ddp.zero_grad()
    values = handle.stats().as_dict()
    handle.close()
    return values


def test_a_handle_tells_it_with_bytes_and_ratio(pools):
    for values in pools(2).run(job):
        assert values["exposed_ms"] > 0 and values["ratio"] > 1
        assert values["wire_bytes_per_step"] > 0


def test_simulated_workers_do_not():
    model = nn.Linear(64, 64)
    simulation = tw.simulate(model, tw.TopK(density=0.05), workers=2)
    for rank in simulation.ranks:
        with simulation.worker(rank):
            model(torch.randn(8, 64)).square().mean().backward()
    simulation.exchange()
    assert simulation.handles[0].stats().exposed_ms is None
