"""Workers that really die or stop: the others are told which exchange of which bucket it was, and what to do."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.contracts.adapters import ADAPTERS, make
from tests.contracts.cluster import sparse
from tests.models import batches, make_cnn, train
from tests.pool import Pool
from thinwire.memory.base import MemoryState
from thinwire.memory.residual import Residual, ResidualState

pytestmark = pytest.mark.workers
TIMEOUT = 6.0
NAMED = r"on rank {rank} of 3 the exchange of dense and sparse for the bucket of \S+"


def watched_training(rank: int, module, optimizer) -> tuple[float, str, str, list[str]]:
    """(seconds, type of the error, its text, what was logged meanwhile)."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("thinwire").addHandler(handler)
    began = time.monotonic()
    try:
        train(module, optimizer, batches(rank, 3))
    except Exception as error:
        return time.monotonic() - began, type(error).__name__, str(error), logged
    finally:
        logging.getLogger("thinwire").removeHandler(handler)
    return time.monotonic() - began, "", "", logged


def begin(rank: int, adapter: str) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    model = make_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    # The pool's own group is patient: on a busy machine its workers are seconds apart when they start.
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    dist.barrier()
    module, optimizer, _ = make(
        adapter, model, optimizer, sparse(), bucket_kb=1, process_group=group
    )
    train(module, optimizer, batches(rank, 3))
    return model, module, optimizer


def killed_job(rank: int, world: int, adapter: str) -> tuple[float, str, str, list[str]]:
    model, module, optimizer = begin(rank, adapter)
    if rank == 1:
        # In mid-step: some buckets have travelled, the rest never will.
        model[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    return watched_training(rank, module, optimizer)


def stopped_job(rank: int, world: int, adapter: str, wait: str, folder: Path) -> tuple:
    """Rank 1 stops in mid-step; it is woken when a shell has done `wait`."""
    model, module, optimizer = begin(rank, adapter)
    if rank == 1:
        me = os.getpid()
        remover = model[0].weight.register_hook(lambda _: stop())

        def stop() -> None:
            remover.remove()
            # Somebody has to wake it.
            subprocess.Popen(["sh", "-c", f"{wait}; kill -CONT {me}"], cwd=folder)
            os.kill(me, signal.SIGSTOP)

    found = watched_training(rank, module, optimizer)
    (folder / f"over{rank}").touch()
    return found


def waits(logged: list[str]) -> list[str]:
    return [line for line in logged if "has waited" in line]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_worker_that_stops_for_a_while_costs_a_sentence_and_one_that_is_killed_ends_the_others(
    adapter, tmp_path
):
    pool = Pool(3)
    try:
        for_a_while = pool.run(stopped_job, adapter, f"sleep {TIMEOUT / 4}", tmp_path)
        replies = pool.attempt(killed_job, adapter)
    finally:
        pool.stop()
    for rank in (0, 2):
        _, kind, message, logged = for_a_while[rank]
        assert (kind, message) == ("", "") and waits(logged)
    assert not replies[1][0] and "died" in replies[1][1]
    for rank in (0, 2):
        ok, reply = replies[rank]
        assert ok, reply
        seconds, kind, message, _ = reply
        # Far less than a job may take, on a busy machine too.
        assert seconds < 5 * TIMEOUT
        assert kind == "ExchangeError"
        assert re.match(NAMED.format(rank=rank), message), message
        assert message.endswith("and start again from a checkpoint")
        assert "cast" not in message and "\n" not in message


def test_a_stopped_worker_is_mentioned_after_a_tenth_of_the_timeout_and_ends_the_others(tmp_path):
    until_others_gave_up = "until [ -e over0 ] && [ -e over2 ]; do sleep 0.1; done"
    pool = Pool(3)
    try:
        replies = pool.attempt(stopped_job, "ddp", until_others_gave_up, tmp_path)
    finally:
        pool.stop()
    for rank in (0, 2):
        ok, reply = replies[rank]
        assert ok, reply
        _, kind, message, logged = reply
        assert kind == "ExchangeError"
        assert re.match(NAMED.format(rank=rank), message), message
        line = waits(logged)[-1]
        assert re.match(NAMED.format(rank=rank) + r".* has waited for \d+ s: a worker hangs", line)
        assert line.endswith("the group gives up after 6 s")


class FailsOnce(ResidualState):
    """A memory that cannot be opened while `failing`."""

    failing = False

    def compensate(self, group, gradients, scale):
        if FailsOnce.failing:
            raise tw.ExchangeError("the link is down")
        return super().compensate(group, gradients, scale)


@dataclass(frozen=True)
class Unreliable(Residual):
    def start(self) -> MemoryState:
        return FailsOnce(self)


def recovers_job(rank: int, world: int, options: dict) -> str:
    """An error of ours ends backward with its own type, and DDP goes on afterwards."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, **options)
    handle = tw.attach(ddp, sparse(memory=Unreliable()))
    ddp(torch.randn(4, 32)).sum().backward()
    ddp.zero_grad()
    FailsOnce.failing = True
    with pytest.raises(tw.ExchangeError, match=r"^the link is down$"):
        ddp(torch.randn(4, 32)).sum().backward()
    FailsOnce.failing = False
    assert any(bool(p.grad.isnan().all()) for p in ddp.parameters())
    ddp.zero_grad()
    ddp(torch.randn(4, 32)).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in ddp.parameters())
    handle.close()
    return "fine"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
    ],
    ids=str,
)
def test_ddp_can_be_used_after_an_error_of_ours(pools, options):
    assert pools(2).run(recovers_job, options) == ["fine", "fine"]
