"""Sums of one round travel together, and give what they give apart."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.exchange.ranks import Ranks, gradients
from thinwire.engine.fusing import FusedBatch, fuse_requests, in_rank_order
from thinwire.engine.virtual import run_virtual
from thinwire.exchange.requests import INSIDE, AllToAll, Gather, Sum, together
from thinwire.exchange.split import SplitReduce
from thinwire.exchange.tree import TreeMerge
from thinwire.methods.base import Method
from thinwire.observe.ledger import Ledger


def make_batch(rank: int):
    generator = torch.Generator().manual_seed(rank)
    matrix = torch.randn(3, 5, generator=generator)
    return (
        Sum(matrix.t(), "dense"),
        Gather(matrix[0], "sparse"),
        Sum(matrix[:0], "nothing"),
        Sum(matrix.double(), "wide"),
        Sum(matrix[1:], "lowrank", control_bytes=8, padding_bytes=torch.tensor(4)),
        Sum(matrix.double(), "wide", control_bytes=16),
    )


def ask(rank: int):
    first = yield make_batch(rank)
    (second,) = yield (Sum(first[4].clone(), "again"),)
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


def test_messages_to_owners_travel_together():
    def ask(rank: int, numel: int, apart: bool):
        rows = torch.arange(3 * numel).view(3, numel) + 100 * rank
        (reply,) = yield (AllToAll(rows, f"split {numel}", apart=apart),)
        return reply

    def programs(apart: bool):
        ranks = [[ask(rank, numel, apart) for numel in (2, 5)] for rank in range(3)]
        return [fuse_requests(together(both)) for both in ranks]

    ledger = Ledger(3)
    expected, found = run_virtual(programs(False)), run_virtual(programs(True), ledger)
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.shape == other.shape and torch.equal(one, other)
    assert ledger.messages() == 1


@pytest.mark.parametrize(("exchange", "messages"), [(SplitReduce(), 2), (TreeMerge(), 4)])
def test_as_many_collectives_however_many_buckets_travel_together(exchange, messages):
    def buckets() -> list[Ranks]:
        return [Ranks(exchange, 3, [(n,)], 0.05, "bf16", names=(f"w{n}",)) for n in (900, 501)]

    inputs = [gradients("normal", 3, n) for n in (900, 501)]
    expected = [one.step(given).update for one, given in zip(buckets(), inputs, strict=True)]
    pairs = list(zip(buckets(), inputs, strict=True))
    programs = [
        fuse_requests(together([one.open(rank, given[rank]).program for one, given in pairs]))
        for rank in range(3)
    ]
    ledger = Ledger(3)
    for outcomes in run_virtual(programs, ledger):
        assert all(torch.equal(o.update, e) for o, e in zip(outcomes, expected, strict=True))
    assert ledger.messages() == messages


def test_other_ranks_and_single_requests_stay_apart():
    ones = torch.ones(2)
    batch = (Sum(ones), Sum(ones, scope=INSIDE), Sum(ones.long()))
    assert FusedBatch.of(batch).requests == batch
    assert FusedBatch.of(()).split([]) == []


def test_programs_that_end_at_once_or_apart():
    def sums(rounds: int):
        total = torch.ones(1)
        for _ in range(rounds):
            (total,) = yield (Sum(total.clone(), "sum"),)
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
    # Sums in rank order take two collectives each.
    assert pools(3).run(count_job, tw.ACPSGD(rank=4), True)[0] == {"dense+lowrank": 8}


def test_sums_in_rank_order_do_not_depend_on_their_company():
    """Nor do whole numbers change, or whatever is no sum."""

    def numbers(rank: int, size: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * rank + size)
        return torch.randn(size, generator=generator) * 10 ** torch.randint(
            -4, 5, (size,), generator=generator
        )

    def program(rank: int, sizes: list[int]):
        batch = [Sum(numbers(rank, size), "s") for size in sizes]
        replies = yield (*batch, Sum(torch.tensor([rank]), "n"), Gather(torch.tensor([rank]), "g"))
        return replies

    def run(sizes: list[int]) -> list[torch.Tensor]:
        programs = [
            in_rank_order(fuse_requests(program(rank, sizes)), lambda scope: 3) for rank in range(3)
        ]
        return run_virtual(programs)[0]

    whole = run([5, 7, 64, 1])
    assert [int(whole[4]), whole[5].view(-1).tolist()] == [3, [0, 1, 2]]
    for index, size in enumerate([5, 7, 64, 1]):
        expected = numbers(0, size) + numbers(1, size) + numbers(2, size)
        assert torch.equal(whole[index], expected)
        assert torch.equal(run([size])[0], expected)
