"""Contracts 1 and 2 for every exchange on virtual ranks: all world sizes, sizes, densities and inputs that go wrong."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.exchange.ranks import KINDS, Ranks, check_step, gradients
from tests.lanes import slow
from thinwire.exchange.agreed import CyclicLeader
from thinwire.exchange.all_gather import AllGather
from thinwire.exchange.dsa import SplitGather
from thinwire.exchange.exclusive import Exclusive
from thinwire.exchange.reused import ReusedThresholds
from thinwire.exchange.split import SplitReduce
from thinwire.exchange.tree import TreeMerge

EXCHANGES = {
    "exclusive": Exclusive(),
    "leader": CyclicLeader(),
    "split": SplitReduce(),
    "full": SplitReduce(contribution="full"),
    "reused": ReusedThresholds(tau=4, tau_prime=3),
    "dsa": SplitGather(),
    "tree": TreeMerge(),
}
SHAPES = [[(1,)], [(7,)], [(40, 48), (33, 5), (257,)]]


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("world", [1, 3])
def test_a_bad_step_is_seen_everywhere_and_returns_everything(name, world):
    ranks = Ranks(EXCHANGES[name], world, SHAPES[-1], 0.05, "bf16")
    ranks.step(gradients("normal", world, ranks.numel))
    bad = [rank == world - 1 for rank in range(world)]
    step = ranks.step(gradients("normal", world, ranks.numel, 1), bad=bad)
    assert all(bool(outcome.non_finite) for outcome in step.outcomes)
    for before, after in zip(step.before, step.after, strict=True):
        # Partial sums that a merge gave back leave through the same roundings, not through the same bits.
        assert (
            torch.allclose(before, after, rtol=1e-6, atol=1e-6)
            if name == "tree"
            else torch.equal(before, after)
        )


@pytest.mark.parametrize("name", EXCHANGES)
def test_two_runs_give_the_same_bits(name):
    twins = [Ranks(EXCHANGES[name], 4, SHAPES[-1], 0.05, "bf16") for _ in range(2)]
    for seed in range(3):
        one, other = (ranks.step(gradients("heavy tail", 4, ranks.numel, seed)) for ranks in twins)
        assert torch.equal(one.update, other.update)


@pytest.mark.parametrize("name", ["exclusive", "leader", "split", "full"])
def test_everything_at_density_one_is_the_plain_mean(name):
    ranks = Ranks(EXCHANGES[name], 4, [(64 * 64,)], 1.0)
    inputs = gradients("integers", 4, ranks.numel)
    step = ranks.step(inputs)
    assert torch.equal(step.update, sum(inputs) / 4)
    assert not any(bool(after.any()) for after in step.after)


@pytest.mark.parametrize(
    ("world", "name"),
    [
        *((world, name) for world in (1, 3) for name in EXCHANGES),
        *((8, name) if name in ("split", "tree") else slow(8, name) for name in EXCHANGES),
    ],
)
def test_conserves_and_agrees_on_every_input(world, name):
    for which, shapes in enumerate(SHAPES):
        for step, density in enumerate((1e-4, 0.02, 0.5, 1.0)):
            values = "bf16" if (which + step + world) % 2 else "fp32"
            ranks = Ranks(EXCHANGES[name], world, shapes, density, values)
            for seed, kind in enumerate(KINDS):
                outcome = ranks.step(gradients(kind, world, ranks.numel, seed))
                check_step(outcome, world, exact=values == "fp32" and name != "tree")


@pytest.mark.parametrize("name", ["exclusive", "split", "tree"])
def test_least_squares_reaches_what_dense_reaches(name):
    world, n = 3, 60
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(40, n, generator=generator) / 40**0.5 for _ in range(world)]
    truth = torch.randn(n, generator=generator)
    ranks = Ranks(EXCHANGES[name], world, [(n,)], 0.2)
    weights = torch.zeros(n)
    for _ in range(200):
        pulls = [a.T @ (a @ (weights - truth)) for a in matrices]
        weights = weights - 0.15 * ranks.step(pulls).update
    assert float((weights - truth).norm() / truth.norm()) < 0.1


def test_rank_order_does_not_matter_for_integers():
    inputs = gradients("integers", 4, 5000)
    updates = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        ranks = Ranks(SplitReduce(capacity=1.5), 4, [(5000,)], 0.5)
        updates.append(ranks.step([inputs[r] for r in order]).update)
    both = (updates[0] != 0) & (updates[1] != 0)
    assert torch.equal(updates[0][both], updates[1][both])


class CountingGather(AllGather):
    """Counts how often payloads are read."""

    reads: ClassVar[list[int]] = []

    def combine(self, gathered, used, codec, dtype):
        self.reads.append(len(gathered))
        return super().combine(gathered, used, codec, dtype)


@pytest.mark.parametrize("bias", [1, 100, 4000])
def test_payloads_are_read_once_for_all_virtual_ranks_whatever_travels_beside_them(bias):
    CountingGather.reads.clear()
    method = tw.ADTopK(density=0.05, exchange=CountingGather(), dense_fallback=False)
    cluster = Cluster(4, method, shapes={"weight": (200, 200), "bias": (bias,)})
    for count in range(2):
        cluster.step(cluster.random(count))
        assert CountingGather.reads == [4] * (count + 1)
