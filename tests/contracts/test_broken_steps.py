"""A step that ends halfway: nothing is lost, nothing of it is sent later, nobody waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.contracts.cluster import SHAPES, Cluster, parameter, sparse
from thinwire.engine.drivers import ThreadDriver
from thinwire.engine.groups import private_group
from thinwire.engine.network import Network
from thinwire.engine.reducer import Reducer
from thinwire.errors import ExchangeError
from thinwire.exchange.requests import Batch
from thinwire.layout import Bucket
from thinwire.memory.base import Memory, MemoryState
from thinwire.memory.residual import Residual, ResidualState
from thinwire.observe.ledger import Ledger

WORLD = 2


@dataclass(frozen=True)
class NoPaper(Memory):
    """A memory that cannot be opened."""

    def start(self) -> MemoryState:
        return NoPaperState(Residual())


class NoPaperState(ResidualState):
    def compensate(self, group, gradients, scale) -> NoReturn:
        raise OSError("no more paper")


NO_PAPER = tw.Compose(select=tw.select.TradTopK(1.0), memory=NoPaper(), dense_fallback=False)


def hand_in(cluster: Cluster, names: list[str], gradients) -> list[Future[Tensor]]:
    """One bucket of all ranks."""
    futures = []
    for rank, layout in enumerate(cluster.layouts_of(names)):
        flat = torch.zeros(layout.numel)
        for slot in layout.slots:
            slot.view(flat).copy_(gradients[rank][slot.name])
        futures.append(cluster.reducers[rank].reduce(Bucket(layout, flat)))
    return futures


def end(cluster: Cluster) -> None:
    """The end of the backward."""
    for reducer in cluster.reducers:
        reducer.end_backward()
    cluster.ranks.run()


def test_a_bucket_of_a_step_that_was_never_finished_does_not_leave_with_the_next_one():
    cluster = Cluster(WORLD, sparse())
    for reducer in cluster.reducers:
        reducer.coalesce_bytes = 1 << 30
    broken, whole = cluster.random(0), cluster.random(1)
    left_behind = hand_in(cluster, ["linear"], broken)
    first = hand_in(cluster, ["linear"], whole)
    second = hand_in(cluster, ["head"], whole)
    end(cluster)
    for future in left_behind:
        with pytest.raises(ExchangeError, match="before its last bucket"):
            future.wait()
    totals = {}
    for name, futures in (("linear", first), ("head", second)):
        update = futures[0].value().view(cluster.infos[name].shape)
        held = sum(cluster.residuals(rank)[name] for rank in range(WORLD))
        totals[name] = WORLD * update + held
    fresh = {name: sum(whole[rank][name] for rank in range(WORLD)) for name in totals}
    fresh["linear"] = fresh["linear"] + sum(broken[rank]["linear"] for rank in range(WORLD))
    for name, total in totals.items():
        torch.testing.assert_close(total, fresh[name])


def test_what_one_group_sent_returns_if_another_of_its_bucket_cannot_be_opened():
    """Groups are opened last to first: what one took out of memory by then must be in the step's record."""
    cluster = Cluster(WORLD, sparse(), policy=[tw.rule("head", method=NO_PAPER)])
    gradients = cluster.random(0)
    for future in hand_in(cluster, ["head", "linear"], gradients):
        with pytest.raises(OSError, match="no more paper"):
            future.wait()
    for rank, reducer in enumerate(cluster.reducers):
        assert len(reducer.record.accounts) == 1
        assert torch.equal(cluster.residuals(rank)["linear"], gradients[rank]["linear"])


class Late(nn.Module):
    """The first layer, which is in the last bucket, is frozen when the handle comes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def unfrozen_job(rank: int, world: int) -> None:
    model = Late()
    ddp = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.001)
    # The second backward has the buckets in the order in which gradients come.
    for _ in range(2):
        ddp(torch.randn(4, 32)).sum().backward()
    model.layers[0].requires_grad_(False)
    handle = tw.attach(ddp, sparse("fp32"))
    model.layers[0].requires_grad_(True)
    with pytest.raises(Exception, match="was frozen when attach was called"):
        ddp(torch.randn(4, 32)).sum().backward()
    handle.close()


def test_a_bucket_that_is_refused_last_lets_the_others_go(pools):
    pools(2).run(unfrozen_job, timeout=30.0)


def test_an_error_before_a_job_begins_ends_its_bucket_and_those_that_wait():
    """A stream that cannot be waited for."""
    cluster = Cluster(1, sparse())
    (reducer,) = cluster.reducers
    reducer.coalesce_bytes = 1 << 30
    (waiting,) = hand_in(cluster, ["linear"], cluster.random(0))

    def refuse(job: Callable[[], None], on_error: Callable[[Exception], None]) -> None:
        on_error(RuntimeError("the device is lost"))

    hand_over, reducer.driver.hand_over = reducer.driver.hand_over, refuse
    (refused,) = hand_in(cluster, ["head"], cluster.random(0))
    reducer.driver.hand_over = hand_over
    with pytest.raises(RuntimeError, match="the device is lost"):
        refused.wait()
    end(cluster)
    assert waiting.done()


def late_error_job(rank: int, world: int) -> None:
    """A bucket that fails at once must not let the step be taken back while another one is on its way."""
    infos = {name: parameter(name, SHAPES[name]) for name in ("linear", "head")}
    driver = ThreadDriver(Slow(private_group(dist.group.WORLD), Ledger(world)))
    policy = [tw.rule("head", method=NO_PAPER)]
    reducer = Reducer(infos, sparse(), driver, device=torch.device("cpu"), policy=policy)
    gradients = {name: torch.randn(info.shape) for name, info in infos.items()}
    sent = {name: gradient.clone() for name, gradient in gradients.items()}
    good = reducer.reduce_named({"linear": sent["linear"]})
    bad = reducer.reduce_named({"head": sent["head"]})
    with pytest.raises(OSError, match="no more paper"):
        bad.wait()
    assert not good.done()
    reducer.settle(discard=True)
    assert good.done()
    held = reducer.assignments.held("linear", "residual")
    assert held is not None and torch.equal(held, gradients["linear"])
    driver.close()


class Slow(Network):
    def perform(self, batch: Batch, what: str = "") -> list[Tensor]:
        time.sleep(0.5)
        return super().perform(batch, what)


def test_a_step_is_taken_back_when_all_of_it_has_come_to_its_end(pools):
    pools(2).run(late_error_job)
