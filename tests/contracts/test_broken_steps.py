"""A step that ends halfway: nothing is lost, nothing of it is sent later, nobody waits for it."""

from __future__ import annotations

import time
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.contracts.cluster import Cluster, Collector, sparse
from thinwire.dense_compressor import DenseCompressor
from thinwire.errors import ExchangeError
from thinwire.exchange.drivers import Job, ThreadDriver, run_virtual
from thinwire.exchange.network import Network, private_group
from thinwire.exchange.requests import Batch
from thinwire.layout import Bucket, BucketLayout
from thinwire.observe.ledger import Ledger

WORLD = 2


def hand_in(cluster: Cluster, names: list[str], gradients, **options) -> list[Future[Tensor]]:
    """One bucket of all ranks."""
    futures = []
    for rank, layout in enumerate(cluster._layout(names)):
        flat = torch.zeros(layout.numel)
        for slot in layout.slots:
            slot.view(flat).copy_(gradients[rank][slot.name])
        futures.append(cluster.pipelines[rank].reduce(Bucket(layout, flat), **options))
    return futures


def deliver(cluster: Cluster) -> None:
    while cluster.drivers[0].programs:
        run_virtual([driver.programs.pop(0) for driver in cluster.drivers])


def test_a_bucket_of_a_step_that_was_never_finished_does_not_leave_with_the_next_one():
    cluster = Cluster(WORLD, sparse())
    for pipeline in cluster.pipelines:
        pipeline.convoy.worth_sending = 1 << 30
    broken, whole = cluster.random(0), cluster.random(1)
    left_behind = hand_in(cluster, ["linear"], broken)
    first = hand_in(cluster, ["linear"], whole)
    second = hand_in(cluster, ["head"], whole, last=True)
    deliver(cluster)
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


def test_what_one_group_sent_returns_if_another_of_its_bucket_cannot_be_opened(monkeypatch):
    """Dense slots are opened last: what the sparse ones took out of memory by then must be in the step's book."""
    cluster = Cluster(WORLD, sparse())
    names = list(cluster.infos)
    gradients = cluster.random(0)

    def refuse(self, step):
        raise OSError("no more paper")

    with monkeypatch.context() as patch:
        patch.setattr(DenseCompressor, "open_fused", refuse)
        for future in hand_in(cluster, names, gradients, last=True):
            with pytest.raises(OSError, match="no more paper"):
                future.wait()
    for pipeline in cluster.pipelines:
        assert len(pipeline._book.accounts) == 1


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


class Stubborn(Collector):
    """Its stream cannot be waited for."""

    def hand_over(self, job: Job) -> None:
        def refuse() -> None:
            raise RuntimeError("the device is lost")

        job(refuse)


def test_an_error_before_a_job_begins_ends_its_bucket_and_those_that_wait():
    cluster = Cluster(1, sparse())
    (pipeline,) = cluster.pipelines
    pipeline.convoy.worth_sending = 1 << 30
    (waiting,) = hand_in(cluster, ["linear"], cluster.random(0))
    pipeline.driver = Stubborn(pipeline.driver.place)
    (refused,) = hand_in(cluster, ["head"], cluster.random(0), last=True)
    with pytest.raises(RuntimeError, match="the device is lost"):
        refused.wait()
    deliver(cluster)
    assert waiting.done()


def late_error_job(rank: int, world: int) -> None:
    """A bucket that fails at once must not let the step be taken back while another one is on its way."""
    cluster = Cluster(world, sparse())
    driver = ThreadDriver(Slow(private_group(dist.group.WORLD), Ledger(world)))
    pipeline = cluster.pipelines[rank]
    pipeline.driver = pipeline.convoy.driver = driver
    layouts = [cluster._layout([name])[rank] for name in ("linear", "head")]
    gradients = cluster.random(0)[rank]
    flats = [gradients[layout.slots[0].name].reshape(-1).clone() for layout in layouts]
    good = pipeline.reduce(Bucket(layouts[0], flats[0]))
    picked, pipeline._groups_of = pipeline._groups_of, refuse_groups  # type: ignore[method-assign]
    bad = pipeline.reduce(Bucket(layouts[1], flats[1]), last=True)
    pipeline._groups_of = picked  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no more paper"):
        bad.wait()
    assert not good.done()
    pipeline.settle(discard=True)
    assert good.done()
    held = pipeline.roster.held("linear", "residual")
    assert held is not None and torch.equal(held, gradients["linear"])
    driver.close()


class Slow(Network):
    def perform(self, batch: Batch) -> list[Tensor]:
        time.sleep(0.5)
        return super().perform(batch)


def refuse_groups(layout: BucketLayout) -> NoReturn:
    raise OSError("no more paper")


def test_a_step_is_taken_back_when_all_of_it_has_come_to_its_end(pools):
    pools(2).run(late_error_job)
