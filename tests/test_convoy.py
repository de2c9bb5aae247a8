"""Buckets that travel together: fewer collectives, the same bits."""

from __future__ import annotations

import pytest
import torch
from torch.futures import Future

import thinwire as tw
from tests.contracts.cluster import SHAPES, Cluster, Collector
from thinwire.convoy import Convoy
from thinwire.errors import ExchangeError
from thinwire.exchange.drivers import run_virtual
from thinwire.exchange.requests import AllGather, AllReduce, Place
from thinwire.layout import Bucket

WORLD = 3


def sends(value: float):
    (reply,) = yield (AllReduce(torch.full((2,), value), "sum"),)
    return reply


def test_small_programs_wait_for_each_other_and_large_ones_do_not():
    driver = Collector(Place(0, 1))
    convoy = Convoy(driver, worth_sending=100)
    convoy.add(sends(1.0), 60, Future())
    assert not driver.programs
    convoy.add(sends(2.0), 50, Future())
    assert len(driver.programs) == 1
    convoy.add(sends(3.0), 100, Future())
    assert len(driver.programs) == 2
    convoy.add(sends(4.0), 1, Future())
    convoy.leave()
    assert len(driver.programs) == 3
    convoy.leave()
    assert len(driver.programs) == 3


def run(worth_sending: int, method: tw.Method, steps: int = 3):
    """Updates and residuals of a cluster whose every parameter is a bucket of its own, and the collectives of rank 0."""
    cluster = Cluster(WORLD, method, shapes=SHAPES)
    for pipeline in cluster.pipelines:
        pipeline.convoy.worth_sending = worth_sending
    collectives, results = 0, []
    for count in range(steps):
        gradients = cluster.random(count)
        flats: list[list[torch.Tensor]] = [[] for _ in range(WORLD)]
        for name in cluster.infos:
            for rank, layout in enumerate(cluster._layout([name])):
                flat = gradients[rank][name].reshape(-1).clone()
                flats[rank].append(flat)
                cluster.pipelines[rank].reduce(Bucket(layout, flat))
        for pipeline in cluster.pipelines:
            pipeline.convoy.leave()
        while cluster.drivers[0].programs:
            requests: list[int] = []

            def counted(program, requests=requests):
                try:
                    batch = next(program)
                    while True:
                        requests.append(len(batch))
                        batch = program.send((yield batch))
                except StopIteration as finished:
                    return finished.value

            run_virtual([counted(d.programs.pop(0)) for d in cluster.drivers])
            collectives += sum(requests) // WORLD
        results.append(
            ([torch.cat(f) for f in flats], [cluster.residuals(r) for r in range(WORLD)])
        )
    return results, collectives


@pytest.mark.parametrize(
    "method",
    [
        tw.ADTopK(density=0.1, dense_fallback=False),
        tw.OkTopK(density=0.1, dense_fallback=False),
        tw.PowerSGD(rank=2),
    ],
    ids=lambda m: type(m).__name__,
)
def test_the_same_bits_in_fewer_collectives(method):
    apart, many = run(0, method)
    together, few = run(1 << 30, method)
    assert few < many
    for (flats, held), (others, other_held) in zip(apart, together, strict=True):
        for mine, other in zip(flats, others, strict=True):
            assert torch.equal(mine, other)
        for mine, other in zip(held, other_held, strict=True):
            assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_an_error_reaches_everybody_who_travels():
    class Broken(Collector):
        def start(self, program, future=None):
            future = Future() if future is None else future
            future.set_exception(ExchangeError("the link is down"))
            return future

    convoy = Convoy(Broken(Place(0, 1)), worth_sending=100)
    futures: list[Future] = [Future(), Future()]
    for future in futures:
        convoy.add(sends(1.0), 10, future)
    convoy.leave()
    for future in futures:
        with pytest.raises(ExchangeError, match="the link is down"):
            future.wait()


def test_payloads_that_shared_a_collective_are_what_was_sent():
    from thinwire.exchange.fused import fuse_requests
    from thinwire.exchange.requests import together

    def gathers(rank: int, size: int):
        payload = torch.full((size,), 10 * rank + size, dtype=torch.uint8)
        (reply,) = yield (AllGather(payload, "p", apart=True),)
        return reply

    programs = [
        fuse_requests(together([gathers(rank, 16), gathers(rank, 32)])) for rank in range(2)
    ]
    for first, second in run_virtual(programs):
        assert first.tolist() == [[16] * 16, [26] * 16]
        assert second.tolist() == [[32] * 32, [42] * 32]


@pytest.mark.parametrize("deterministic", [False, True])
def test_small_dense_tensors_are_gathered_beside_a_payload_and_large_ones_are_not(deterministic):
    """The sums of both ways agree; what a parameter is said to send is what is sent."""
    shapes = {"weight": (200, 200), "bias": (40,), "scalar": ()}
    cluster = Cluster(WORLD, tw.ADTopK(density=0.05), shapes=shapes, deterministic=deterministic)
    apart = Cluster(WORLD, tw.ADTopK(density=0.05), shapes=shapes, deterministic=deterministic)
    apart.buckets = [["weight"], ["bias", "scalar"]]
    for seed in range(2):
        gradients = cluster.random(seed)
        ours, theirs = cluster.step(gradients), apart.step(gradients)
        for rank in range(WORLD):
            for name in shapes:
                assert torch.allclose(ours[rank][name], theirs[rank][name], rtol=1e-6)
                assert torch.equal(ours[rank][name], ours[0][name])
    sent = {name: row.wire_bytes for name, row in cluster.pipelines[0].tally.parameters.items()}
    assert sent["bias"] == 2 * (WORLD - 1) * 4 * 40
    other = {name: row.wire_bytes for name, row in apart.pipelines[0].tally.parameters.items()}
    assert other["bias"] == 2 * 2 * (WORLD - 1) / WORLD * 4 * 40
