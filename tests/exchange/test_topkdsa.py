from __future__ import annotations

import pytest
import torch

from tests.exchange.ranks import Ranks, check_step, gradients
from thinwire.exchange import dsa, uneven
from thinwire.exchange.all_gather import AllGather
from thinwire.exchange.dsa import SplitGather
from thinwire.exchange.exclusive import Exclusive
from thinwire.exchange.split import SplitReduce
from thinwire.exchange.uneven import Entries
from thinwire.methods.gaussiank import GaussianK


def phases(step) -> set[str]:
    return {phase for phase, _ in step.ledgers[0].rows()}


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("density", [0.01, 0.5])
def test_sends_what_an_all_gather_sends(world, density):
    """Both keep everything that was sent, added in rank order: the same bits, whether dense or sparse."""
    one, other = (
        Ranks(e, world, [(900,), (30, 30)], density) for e in (SplitGather(), AllGather())
    )
    for seed in range(3):
        inputs = gradients("heavy tail", world, one.numel, seed)
        assert torch.equal(one.step(inputs).update, other.step(inputs).update)


def test_regions_travel_dense_once_there_are_too_many_sums():
    ranks = Ranks(SplitGather(), 4, [(4000,)], 0.2)
    step = ranks.step(gradients("normal", 4, 4000))
    check_step(step, 4)
    assert "sparse/regions" in phases(step)
    sparse = Ranks(SplitGather(), 4, [(4000,)], 0.01)
    assert "sparse/gather" in phases(sparse.step(gradients("normal", 4, 4000)))


def conserves(n: int = 2000, world: int = 3) -> None:
    ranks = Ranks(SplitGather(), world, [(n,)], 0.05)
    check_step(ranks.step(gradients("normal", world, n)), world)


def test_mutation_strict_threshold_loses_the_kth_entry(monkeypatch):
    """B3: `>` against the k-th magnitude sends k-1 entries while all k are cleared."""
    real = uneven.send_to_owners

    def send(offer, entries, owner, bad):
        strictly = entries.values.abs() > entries.values.abs().min()
        reply = yield from real(offer, entries.at(strictly), owner[strictly], bad)
        return reply

    conserves()
    monkeypatch.setattr(dsa, "send_to_owners", send)
    with pytest.raises(AssertionError):
        conserves()


def test_mutation_missing_own_part(monkeypatch):
    real = uneven.send_to_owners

    def send(offer, entries, owner, bad):
        foreign = owner != offer.place.rank
        reply = yield from real(offer, entries.at(foreign), owner[foreign], bad)
        return reply

    monkeypatch.setattr(dsa, "send_to_owners", send)
    with pytest.raises(AssertionError):
        conserves()


def odd_winner(exchange) -> None:
    """One entry at an odd place beyond 2^24, which a 32-bit float cannot name."""
    n = 2**24 + 64
    ranks = Ranks(exchange, 2, [(n,)], 1e-7)
    winner = torch.zeros(n)
    winner[2**24 + 33] = 3.0
    step = ranks.step([winner, winner])
    assert step.update.nonzero().view(-1).tolist() == [2**24 + 33]
    assert float(step.update[2**24 + 33]) == 3.0


@pytest.mark.parametrize("exchange", [SplitGather(), Exclusive()], ids=["dsa", "exclusive"])
def test_indices_beyond_24_bits(exchange):
    odd_winner(exchange)


def test_mutation_indices_as_floats(monkeypatch):
    real = Entries.pack
    monkeypatch.setattr(
        Entries, "pack", lambda self: real(Entries(self.positions.float().long(), self.values))
    )
    with pytest.raises(AssertionError):
        odd_winner(SplitGather())


@pytest.mark.parametrize("exchange", [SplitGather(), SplitReduce(), Exclusive()], ids=str)
def test_a_selection_whose_count_varies(exchange):
    """GaussianK over split-and-reduce, as it is compared with in the Ok-Topk paper."""
    ranks = Ranks(exchange, 4, [(64, 96), (3000,)], select=GaussianK(density=0.05).selector())
    for seed in range(3):
        step = ranks.step(gradients("heavy tail", 4, ranks.numel, seed))
        check_step(step, 4)
        assert int(step.outcomes[0].sent.sum()) > 0
