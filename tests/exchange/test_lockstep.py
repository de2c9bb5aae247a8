"""Virtual ranks in teams: one program for several of them, with the bits and the traffic of each for itself."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.exchange.ranks import KINDS, Ranks, Step, check_step, gradients
from thinwire.errors import WireError
from thinwire.exchange import split
from thinwire.exchange.base import Exchange
from thinwire.exchange.drivers import run_virtual
from thinwire.exchange.hierarchy import Hierarchical
from thinwire.exchange.lockstep import TeamProgram, in_teams, jointly
from thinwire.exchange.places import pack, unpack
from thinwire.exchange.requests import AllReduce, Place, Program, together
from thinwire.exchange.split import SplitReduce

SHAPES = [(40, 50), (3000,), (7,)]


def traffic(step: Step) -> list[object]:
    return [
        (key, row.messages, row.sent_bytes, row.control_bytes, row.padding_bytes)
        for ledger in step.ledgers
        for key, row in ledger.rows().items()
    ]


def assert_the_same(a: Step, b: Step) -> None:
    for one, other in zip(a.outcomes, b.outcomes, strict=True):
        assert torch.equal(one.update.view(torch.uint8), other.update.view(torch.uint8))
        assert one.sent is not None and other.sent is not None
        assert torch.equal(one.sent, other.sent)
        assert bool(one.non_finite) == bool(other.non_finite)
    for one, other in zip(a.after, b.after, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert traffic(a) == traffic(b)


@pytest.mark.parametrize("values", ["fp32", "bf16"])
@pytest.mark.parametrize("contribution", ["selected", "full"])
@pytest.mark.parametrize("team", [6, 4, 1])
def test_a_team_computes_what_its_ranks_would(monkeypatch, values, contribution, team):
    exchange = SplitReduce(contribution=contribution)
    apart, joined = (Ranks(exchange, 6, SHAPES, 0.05, values) for _ in range(2))
    monkeypatch.setattr(split, "TEAM_ELEMENTS", team * joined.group.numel)
    for seed, kind in enumerate(KINDS):
        inputs = gradients(kind, 6, apart.numel, seed)
        with in_teams():
            step = joined.step(inputs)
        assert_the_same(apart.step(inputs), step)
        check_step(step, 6, exact=values == "fp32", tolerance=1e-5)


def test_peers_on_other_hosts_are_a_team():
    exchange: Exchange = Hierarchical(outer=SplitReduce(), per_host=2)
    apart, joined = (Ranks(exchange, 6, SHAPES, 0.05, per_host=2) for _ in range(2))
    for seed in range(2):
        inputs = gradients("normal", 6, apart.numel, seed)
        with in_teams():
            step = joined.step(inputs)
        assert_the_same(apart.step(inputs), step)


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_team_saves_most_operations():
    def count(manager: AbstractContextManager[None]) -> int:
        ranks = Ranks(SplitReduce(), 16, SHAPES, 0.05)
        inputs = gradients("normal", 16, ranks.numel)
        ranks.step(inputs)
        opened = [ranks.open(rank, gradient) for rank, gradient in enumerate(inputs)]
        with Operations() as operations, manager:
            run_virtual([one.program for one in opened])
        return operations.count

    assert 3 * count(in_teams()) < count(nullcontext())


def add_twice(members: list[int], rank: int, calls: list[list[int]]) -> TeamProgram[list[int]]:
    calls.append(list(members))
    totals = members
    for _ in range(2):
        replies = yield [(AllReduce(torch.tensor([number]), "t"),) for number in totals]
        totals = [int(reply[0]) for reply in replies]
    return totals


def test_programs_side_by_side_form_teams_of_their_own():
    calls: list[list[int]] = []

    def start(rank: int, purpose: str, most: int, number: int) -> Program[int]:
        return jointly(
            number, Place(rank, 5), purpose, most, lambda members: add_twice(members, rank, calls)
        )

    def both() -> list[Program[list[int]]]:
        calls.clear()
        return [
            together([start(rank, "a", 2, rank), start(rank, "b", 4, 10 * rank)])
            for rank in range(5)
        ]

    with in_teams():
        results = run_virtual(both())
    assert results == [[50, 500]] * 5
    assert sorted(calls) == [[0, 1], [0, 10, 20, 30], [2, 3], [4], [40]]
    assert run_virtual(both()) == results
    assert sorted(itertools.chain(*calls)) == [0, 0, 1, 2, 3, 4, 10, 20, 30, 40]


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_an_index_that_cannot_be_in_its_place_is_refused(wire):
    lowest, highest = (torch.tensor(n, dtype=torch.int32) for n in ([0, 0, 8], [7, 7, 11]))
    indices = torch.tensor([[[7, -1, 8], [0, 5, -1]]], dtype=torch.int32)
    values = torch.tensor([[[1.0, 0.0, 2.0], [3.0, 4.0, 0.0]]], dtype=wire)
    found, numbers = unpack(pack(indices, values), wire, lowest, highest)
    assert torch.equal(found, indices)
    assert torch.equal(numbers, values)
    for wrong in (-2, 7, 12):
        bad = indices.clone()
        bad[0, 0, 2] = wrong
        with pytest.raises(WireError, match="outside its owner's region"):
            unpack(pack(bad, values), wire, lowest, highest)
