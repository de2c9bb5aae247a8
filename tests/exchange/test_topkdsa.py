from __future__ import annotations

from zlib import crc32

import pytest
import torch

from tests.exchange.ranks import Ranks, check_step, gradients
from tests.lanes import slow
from thinwire.exchange.dsa import SplitGather
from thinwire.exchange.exclusive import Exclusive
from thinwire.exchange.regions import block_bits, deal_blocks
from thinwire.exchange.reused import ReusedThresholds
from thinwire.exchange.split import SplitReduce, capacity_of
from thinwire.exchange.uneven import Entries
from thinwire.methods.gaussiank import GaussianK


def phases(step) -> set[str]:
    return {phase for phase, _ in step.ledgers[0].rows()}


@pytest.mark.parametrize("density", [0.02, 0.3])
@pytest.mark.parametrize("world", [2, 4, 5])
def test_all_sums_come_back_that_find_a_place(world, density):
    """Entries for which their owner had no place are at home; everything else is in the update, whole regions or not."""
    ranks = Ranks(SplitGather(capacity=1.5), world, [(6000,), (30, 30)], density)
    inputs = gradients("integers", world, ranks.numel)
    step = ranks.step(inputs)
    check_step(step, world)
    assert torch.equal((world * step.update).round(), sum(step.accepted))
    for before, accepted in zip(step.before, step.accepted, strict=True):
        sent = accepted != 0
        assert torch.equal(accepted[sent], before[sent])
        assert 0.85 * ranks.k <= int(sent.sum()) <= ranks.k


def test_sums_beyond_k_of_an_owner_return_to_memory():
    """Ranks choose different places, and most of them have the same owner."""
    world, n = 4, 8000
    ranks = Ranks(SplitGather(), world, [(n,)], 0.02)
    bits = block_bits(n, world)
    deal = (deal_blocks("p0.weight", -(-n >> bits)) + crc32(b"p0.weight")) % world
    hot = (deal == 1).repeat_interleave(1 << bits)[:n]
    inputs = []
    for rank, gradient in enumerate(gradients("normal", world, n)):
        mine = torch.arange(n) % world == rank
        inputs.append(torch.where(mine & hot, 100 * gradient, torch.where(mine, gradient, 0.0)))
    step = ranks.step(inputs)
    check_step(step, world)
    room = capacity_of(ranks.k, world, 1.25)
    assert world * room > ranks.k
    assert int((step.update[hot] != 0).sum()) == ranks.k


def test_regions_travel_dense_once_there_may_be_too_many_sums():
    ranks = Ranks(SplitGather(), 4, [(4000,)], 0.2)
    step = ranks.step(gradients("normal", 4, 4000))
    check_step(step, 4)
    assert "sparse/regions" in phases(step)
    sparse = Ranks(SplitGather(), 4, [(4000,)], 0.01)
    assert "sparse/gather" in phases(sparse.step(gradients("normal", 4, 4000)))


@pytest.mark.parametrize("density", [0.01, 0.2])
def test_fixed_lengths_are_as_stated(density):
    world, n = 4, 40_000
    ranks = Ranks(SplitGather(), world, [(n,)], density)
    k, step = ranks.k, ranks.step(gradients("normal", world, n))
    entries = 2 * (1.25 / world + 1) * k * (world - 1)
    regions = (2 * 1.25 * k + n) * (world - 1) / world
    words = entries if density == 0.01 else regions
    (rows,) = (ranks.compressors[0].session.selector.rows(slot) for slot in ranks.group.slots)
    assert SplitGather().slot_bits(rows, 32, 32, world) == pytest.approx(32 * words)
    for traffic in step.traffic:
        sent = (traffic.sent_bytes - traffic.control_bytes) / 4
        assert words <= sent <= 1.01 * words + 100


def odd_winner(exchange) -> None:
    """One entry at an odd place beyond 2^24, which a 32-bit float cannot name."""
    n = 2**24 + 64
    ranks = Ranks(exchange, 2, [(n,)], 1e-7)
    winner = torch.zeros(n)
    winner[2**24 + 33] = 3.0
    step = ranks.step([winner, winner])
    assert step.update.nonzero().view(-1).tolist() == [2**24 + 33]
    assert float(step.update[2**24 + 33]) == 3.0


@pytest.mark.parametrize(
    "exchange",
    [SplitGather(), Exclusive(), slow(ReusedThresholds())],
    ids=lambda e: type(e).__name__,
)
def test_indices_beyond_24_bits(exchange):
    odd_winner(exchange)


@pytest.mark.slow
def test_mutation_indices_as_floats(monkeypatch):
    real = Entries.pack
    monkeypatch.setattr(
        Entries, "pack", lambda self: real(Entries(self.positions.float().long(), self.values))
    )
    with pytest.raises(AssertionError):
        odd_winner(ReusedThresholds())


@pytest.mark.parametrize("exchange", [SplitGather(), SplitReduce(), Exclusive()], ids=str)
def test_a_selection_whose_count_varies(exchange):
    """GaussianK over split-and-reduce, as it is compared with in the Ok-Topk paper."""
    ranks = Ranks(exchange, 4, [(64, 96), (3000,)], select=GaussianK(density=0.05).selector())
    for seed in range(3):
        step = ranks.step(gradients("heavy tail", 4, ranks.numel, seed))
        check_step(step, 4)
        assert int(step.outcomes[0].sent.sum()) > 0
