"""Contract 6: accumulation is honest. Contract 7: exchange overlaps with backward."""

from __future__ import annotations

import logging
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.contracts.cluster import sparse
from tests.models import batches, make_cnn
from thinwire.engine.network import Network

loss_of = nn.functional.cross_entropy


def no_sync_job(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make_cnn(), bucket_cap_mb=0.02)
    handle = tw.attach(ddp, sparse("fp32"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    data = list(batches(rank, 12))
    for step in range(3):
        optimizer.zero_grad()
        held, sent = handle.residual("6.weight"), handle.ledger.messages()
        with ddp.no_sync():
            for images, labels in data[4 * step : 4 * step + 3]:
                loss_of(ddp(images), labels).div(4).backward()
        accumulated = ddp.module[6].weight.grad.clone()
        assert handle.ledger.messages() == sent, "something was sent under no_sync"
        assert torch.equal(handle.residual("6.weight"), held), "memory changed under no_sync"
        assert handle.stats().steps == step
        images, labels = data[4 * step + 3]
        last: list[torch.Tensor] = []
        remover = ddp.module[6].weight.register_hook(last.append)
        loss_of(ddp(images), labels).div(4).backward()
        remover.remove()
        assert handle.stats().steps == step + 1
        c = (held + accumulated + last[0]).double()
        # The mass of all micro-batches, once.
        total = world * ddp.module[6].weight.grad.double()
        parts = torch.stack([c, handle.residual("6.weight").double()])
        torch.distributed.all_reduce(parts)
        error = (total + parts[1] - parts[0]).abs().sum()
        assert error <= 1e-6 * parts[0].abs().sum()
        optimizer.step()
    handle.close()


def test_no_sync_sends_nothing_and_the_last_micro_batch_sends_once(pools):
    pools(3).run(no_sync_job)


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def leftover_job(rank: int, world: int) -> dict[str, int]:
    """How often each habit of a training loop makes thinwire warn."""
    found = {}
    for habit in ("set to none", "set to zero", "zero after forward", "no_sync", "forgotten"):
        for view in (False, True):
            # Several buckets: the first has come long before the last gradient.
            ddp = DistributedDataParallel(
                make_cnn(), gradient_as_bucket_view=view, bucket_cap_mb=0.004
            )
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
            warnings = Warnings()
            logging.getLogger("thinwire").addHandler(warnings)
            handle = tw.attach(ddp, sparse())
            for images, labels in batches(rank, 4):
                if habit in ("set to none", "set to zero", "no_sync"):
                    optimizer.zero_grad(set_to_none=habit != "set to zero")
                if habit == "no_sync":
                    with ddp.no_sync():
                        loss_of(ddp(images), labels).backward()
                loss = loss_of(ddp(images), labels)
                if habit == "zero after forward":
                    optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            logging.getLogger("thinwire").removeHandler(warnings)
            handle.switch(tw.Dense())
            handle.close()
            found[f"{habit}, view {view}"] = sum("zero_grad" in m for m in warnings.messages)
    return found


def test_averaged_gradient_that_is_compressed_again_gets_one_warning(pools):
    for found in pools(2).run(leftover_job):
        expected = {habit: int(habit.startswith("forgotten")) for habit in found}
        assert found == expected


def overlap_job(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make_cnn(), bucket_cap_mb=0.004)
    issued: list[float] = []
    perform = Network.perform

    def record(self: Network, *args: object) -> object:
        issued.append(time.perf_counter())
        return perform(self, *args)  # type: ignore[arg-type]

    Network.perform = record  # type: ignore[method-assign]
    try:
        handle = tw.attach(ddp, sparse())
        # Buckets this small would otherwise wait for each other.
        handle.reducer.coalesce_bytes = 0
        fired: list[float] = []

        def slow(_: torch.Tensor) -> None:
            # As long as a busy machine may need: the first step has one bucket, and nothing to wait for.
            deadline = time.perf_counter() + (20 if fired else 0)
            while not issued and time.perf_counter() < deadline:
                time.sleep(0.01)
            fired.append(time.perf_counter())

        ddp.module[0].weight.register_hook(slow)
        for images, labels in batches(rank, 3):
            ddp.zero_grad()
            issued.clear()
            loss_of(ddp(images), labels).backward()
        # DDP has several buckets after the first step; the first layer's gradient comes last.
        assert issued[0] < fired[-1], "nothing travelled before backward was over"
        handle.close()
    finally:
        Network.perform = perform  # type: ignore[method-assign]


def test_first_collective_leaves_before_the_last_gradient_is_there(pools):
    pools(2).run(overlap_job)
