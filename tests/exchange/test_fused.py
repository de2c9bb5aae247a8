"""Sums of one round travel together, and give what they give apart."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster
from thinwire.exchange.drivers import run_virtual
from thinwire.exchange.fused import FusedBatch, fuse_requests
from thinwire.exchange.requests import INSIDE, AllGather, AllReduce, together
from thinwire.methods.base import Method
from thinwire.observe.ledger import Ledger


def make_batch(rank: int):
    generator = torch.Generator().manual_seed(rank)
    matrix = torch.randn(3, 5, generator=generator)
    return (
        AllReduce(matrix.t(), "dense"),
        AllGather(matrix[0], "sparse"),
        AllReduce(matrix[:0], "nothing"),
        AllReduce(matrix.double(), "wide"),
        AllReduce(matrix[1:], "lowrank", 8, torch.tensor(4)),
        AllReduce(matrix.double(), "wide", 16),
    )


def ask(rank: int):
    first = yield make_batch(rank)
    (second,) = yield (AllReduce(first[4].clone(), "again"),)
    return [*first, second]


def test_replies_are_those_of_sums_apart_and_messages_fewer():
    apart, fused = Ledger(3), Ledger(3)
    expected = run_virtual([ask(rank) for rank in range(3)], apart)
    found = run_virtual([fuse_requests(ask(rank)) for rank in range(3)], fused)
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.shape == other.shape and torch.equal(one, other)
    assert apart.messages() == 7
    assert set(fused.rows()) == {
        ("dense+nothing+lowrank", "all_reduce"),
        ("sparse", "all_gather"),
        ("wide", "all_reduce"),
        ("again", "all_reduce"),
    }
    assert fused.messages() == 4
    for name in ("sent_bytes", "control_bytes", "padding_bytes", "received_bytes"):
        # Each request's bytes are rounded down to whole ones.
        assert abs(getattr(fused.total(), name) - getattr(apart.total(), name)) <= 3


def test_other_ranks_and_single_requests_stay_apart():
    ones = torch.ones(2)
    batch = (AllReduce(ones), AllReduce(ones, scope=INSIDE), AllReduce(ones.long()))
    assert FusedBatch.of(batch).requests == batch
    assert FusedBatch.of(()).split([]) == []


def test_programs_that_end_at_once_or_apart():
    def sums(rounds: int):
        total = torch.ones(1)
        for _ in range(rounds):
            (total,) = yield (AllReduce(total.clone(), "sum"),)
        return float(total)

    ledger = Ledger(2)
    programs = [fuse_requests(together([sums(1), sums(3), sums(0)])) for _ in range(2)]
    assert run_virtual(programs, ledger) == [[2.0, 8.0, 1.0]] * 2
    assert ledger.messages() == 3
    assert run_virtual([fuse_requests(together([sums(0)])) for _ in range(2)]) == [[1.0]] * 2


@pytest.mark.parametrize("method", [tw.PowerSGD(rank=2), tw.ACPSGD(rank=2)], ids=str)
def test_a_bucket_with_dense_parts_gives_the_bits_it_gives_in_parts(method):
    """On virtual ranks sums keep their order, so fusing must not change a bit."""
    whole, parts = Cluster(3, method), Cluster(3, method)
    parts.buckets = [["conv", "linear", "head"], ["bias", "scalar"]]
    for seed in range(4):
        gradients = whole.random(seed)
        ours, theirs = whole.step(gradients), parts.step(gradients)
        for rank in range(3):
            for name, update in ours[rank].items():
                assert torch.equal(update, theirs[rank][name])


def count_job(rank: int, world: int, method: Method, deterministic: bool) -> dict[str, int]:
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
    optimizer = tw.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model=model,
        method=method,
        deterministic=deterministic,
    )
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(3, 40)).square().mean().backward()
        optimizer.step()
    found: dict[str, int] = {}
    for (phase, _), row in optimizer.handle.ledger.rows().items():
        found[phase] = found.get(phase, 0) + row.messages
    optimizer.close()
    return found


def test_collectives_per_bucket_with_its_dense_parts(pools):
    """Four steps of one bucket: two matrices and two vectors."""
    assert pools(3).run(count_job, tw.ACPSGD(rank=4), False)[0] == {"dense+lowrank": 4}
    found = pools(3).run(count_job, tw.PowerSGD(rank=4), False)[0]
    assert found == {"dense+lowrank/p": 4, "lowrank/q": 4}
    # Sums in rank order take two collectives each, and bits must not depend on neighbours.
    assert pools(3).run(count_job, tw.ACPSGD(rank=4), True)[0] == {"dense": 8, "lowrank": 8}
