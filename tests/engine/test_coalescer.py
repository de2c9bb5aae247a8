"""Buckets that travel together: fewer collectives, the same bits."""

from __future__ import annotations

import pytest
import torch
from torch.futures import Future

import thinwire as tw
from tests.contracts.cluster import SHAPES, Cluster
from thinwire.engine.coalescer import BucketCoalescer
from thinwire.engine.virtual import VirtualCluster, VirtualRank, VirtualRanks, run_virtual
from thinwire.errors import ExchangeError
from thinwire.exchange.requests import Gather, Sum
from thinwire.layout import Bucket
from thinwire.observe.ledger import Ledger

WORLD = 3


def sends(value: float):
    (reply,) = yield (Sum(torch.full((2,), value), "sum"),)
    return reply


def test_small_programs_wait_for_each_other_and_large_ones_do_not():
    (driver,) = VirtualCluster(1).drivers
    coalescer = BucketCoalescer(driver, enough=100)
    coalescer.add(sends(1.0), 60, [Future()])
    assert not driver.pending
    coalescer.add(sends(2.0), 50, [Future()])
    assert len(driver.pending) == 1
    coalescer.add(sends(3.0), 100, [Future()])
    assert len(driver.pending) == 2
    coalescer.add(sends(4.0), 1, [Future()])
    coalescer.flush()
    assert len(driver.pending) == 3
    coalescer.flush()
    assert len(driver.pending) == 3


def run(coalesce_bytes: int, method: tw.Method, steps: int = 3):
    """Updates and residuals of a cluster whose every parameter is a bucket of its own, and the collectives of rank 0."""
    cluster = Cluster(WORLD, method, shapes=SHAPES)
    for reducer in cluster.reducers:
        reducer.coalesce_bytes = coalesce_bytes
    results = []
    for count in range(steps):
        gradients = cluster.random(count)
        flats: list[list[torch.Tensor]] = [[] for _ in range(WORLD)]
        for name in cluster.infos:
            for rank, layout in enumerate(cluster.layouts_of([name])):
                flat = gradients[rank][name].reshape(-1).clone()
                flats[rank].append(flat)
                cluster.reducers[rank].reduce(Bucket(layout, flat))
        for reducer in cluster.reducers:
            reducer.end_backward()
        cluster.ranks.run()
        results.append(
            ([torch.cat(f) for f in flats], [cluster.residuals(r) for r in range(WORLD)])
        )
    return results, cluster.ranks.drivers[0].ledger.messages()


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


class Broken(VirtualRank):
    """The driver of a rank whose link is down."""

    def start(self, program, future=None, what=""):
        future = Future() if future is None else future
        future.set_exception(ExchangeError("the link is down"))
        return future


def test_an_error_reaches_everybody_who_travels():
    coalescer = BucketCoalescer(Broken(0, VirtualRanks(1), Ledger(1)), enough=100)
    futures: list[Future] = [Future(), Future()]
    for future in futures:
        coalescer.add(sends(1.0), 10, [future])
    coalescer.flush()
    for future in futures:
        with pytest.raises(ExchangeError, match="the link is down"):
            future.wait()


def test_payloads_that_shared_a_collective_are_what_was_sent():
    from thinwire.engine.fusing import fuse_requests
    from thinwire.exchange.requests import together

    def gathers(rank: int, size: int):
        payload = torch.full((size,), 10 * rank + size, dtype=torch.uint8)
        (reply,) = yield (Gather(payload, "p", apart=True),)
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
    for one, expected in (
        (cluster, (WORLD - 1) * 4 * 40),
        (apart, 2 * (WORLD - 1) / WORLD * 4 * 40),
    ):
        rows = one.reducers[0].tally.parameters
        counted = one.ranks.drivers[0].ledger.sent_bytes()
        assert sum(row.wire_bytes for row in rows.values()) == pytest.approx(counted, rel=0.001)
        # Whole words of 16 bytes travel.
        assert rows["bias"].wire_bytes == pytest.approx(2 * expected, rel=0.1)
