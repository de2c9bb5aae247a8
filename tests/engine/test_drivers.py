"""Drivers: the same programs run in order, errors arrive through the future, a broken group fails fast."""

from __future__ import annotations

import time

import pytest
import torch

from thinwire.engine.drivers import ThreadDriver
from thinwire.engine.groups import private_group
from thinwire.engine.network import Network
from thinwire.engine.virtual import run_virtual
from thinwire.errors import ExchangeError
from thinwire.exchange.requests import AllToAll, Gather, Sum, together
from thinwire.observe.ledger import Ledger


def sums(start: float, rounds: int):
    """Asks for `rounds` sums, each built on the last."""
    total = torch.tensor([start])
    for _ in range(rounds):
        (total,) = yield (Sum(total.clone(), "sum"),)
    return total


def test_programs_side_by_side_share_rounds_and_may_end_apart():
    ledger = Ledger(2)

    def both(rank: int):
        return together([sums(1.0 + rank, 1), sums(10.0, 3), sums(0.0, 0)])

    for result in run_virtual([both(0), both(1)], ledger):
        assert [float(part) for part in result] == [3.0, 80.0, 0.0]
    assert ledger.messages() == 4


def test_virtual_ranks_that_disagree_are_an_error():
    with pytest.raises(ExchangeError, match="number of requests"):
        run_virtual([sums(1.0, 2), sums(1.0, 1)])

    def other():
        yield (Gather(torch.ones(1), "sum"),)

    with pytest.raises(ExchangeError, match="different collectives"):
        run_virtual([sums(1.0, 1), other()])


def test_virtual_replies_mean_what_torch_means():
    def program(rank: int):
        mine = torch.tensor([rank, 10.0 * rank])
        replies = yield (Sum(mine), Gather(mine), AllToAll(mine.view(2, 1)))
        return [reply.tolist() for reply in replies]

    first, second = run_virtual([program(0), program(1)])
    assert first == [[1.0, 10.0], [[0.0, 0.0], [1.0, 10.0]], [[0.0], [1.0]]]
    assert second[2] == [[0.0], [10.0]]


class Broken(Network):
    tried = 0

    def perform(self, batch, what=""):
        self.tried += 1
        self.ledger.messages()
        time.sleep(0.2)
        raise RuntimeError("connection closed by peer")


def thread_driver_job(rank: int, world: int) -> None:
    ledger = Ledger(world)
    driver = ThreadDriver(Network(private_group(torch.distributed.group.WORLD), ledger))
    futures = [driver.start(sums(float(n), n % 4)) for n in range(12)]
    for n, future in enumerate(futures):
        assert float(future.wait()) == n * world ** (n % 4)
    assert ledger.messages() == sum(n % 4 for n in range(12))

    def raises_at_once():
        raise ValueError("before the first request")
        yield

    def raises_later():
        yield (Sum(torch.ones(1), "sum"),)
        raise ValueError("after the first request")

    with pytest.raises(Exception, match="before the first request"):
        driver.start(raises_at_once()).wait()
    assert float(driver.start(sums(1.0, 1)).wait()) == world
    with pytest.raises(Exception, match="after the first request"):
        driver.start(raises_later()).wait()
    driver.close()
    driver.close()


def test_thread_driver_works_in_order_and_reports_errors_through_the_future(pools):
    pools(2).run(thread_driver_job)


def broken_job(rank: int, world: int) -> int:
    network = Broken(private_group(torch.distributed.group.WORLD), Ledger(world))
    driver = ThreadDriver(network)
    for future in [driver.start(sums(1.0, 1)) for _ in range(20)]:
        with pytest.raises(Exception, match="connection closed by peer"):
            future.wait()
    driver.close()
    return network.tried


def test_after_a_failed_collective_the_rest_fails_at_once(pools):
    assert pools(1).run(broken_job) == [1]
