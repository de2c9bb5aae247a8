"""Every exchange on real gloo groups, through DDP."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.exchange.ranks import Ranks, gradients
from tests.exchange.test_virtual import EXCHANGES
from tests.lanes import slow
from tests.models import batches, fingerprint, make_cnn, train
from thinwire.engine.drivers import run_inline
from thinwire.engine.network import Network
from thinwire.exchange.agreed import CyclicLeader
from thinwire.exchange.reused import ReusedThresholds
from thinwire.exchange.split import SplitReduce
from thinwire.methods.exclusive import ExclusiveTopK
from thinwire.methods.gtopk import GTopK
from thinwire.methods.oktopk import OkTopK
from thinwire.methods.topka import TopKA
from thinwire.methods.topkdsa import TopKDSA
from thinwire.observe.ledger import Ledger

METHODS = {
    "OkTopK": OkTopK(density=0.02),
    "full": OkTopK(density=0.02, exchange=SplitReduce(contribution="full")),
    "published": OkTopK(
        density=0.02, thresholds="published", exchange=ReusedThresholds(tau=4, tau_prime=3)
    ),
    "exclusive": ExclusiveTopK(density=0.02),
    "leader": tw.TopK(density=0.02, exchange=CyclicLeader(), values="fp32"),
    "GTopK": GTopK(density=0.02, conserve=True),
    "GTopK-published": GTopK(density=0.02),
    "TopKDSA": TopKDSA(density=0.02),
    "TopKA": TopKA(density=0.02),
}
STEPS = 6
SHAPES = [(40, 48), (33, 5), (257,)]


def job(rank, world, names):
    return {name: train_with(rank, METHODS[name]) for name in names}


def train_with(rank, method):
    """(parameters after a few steps, worst relative conservation error of this rank's book)."""
    ddp = DistributedDataParallel(make_cnn(), bucket_cap_mb=0.02)
    handle = tw.attach(ddp, method)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), batches(rank, STEPS))
    stats = handle.stats()
    name = "6.weight"
    held = handle.residual(name)
    handle.close()
    return fingerprint(ddp), stats.wire_bytes, stats.density, float(held.abs().sum())


def same_job(rank, world):
    """Updates of this rank on the real group, two steps per exchange."""
    network = Network(dist.group.WORLD, Ledger(world))
    found = {}
    for name, exchange in EXCHANGES.items():
        ranks = Ranks(exchange, world, SHAPES, 0.05, "bf16")
        updates = []
        for seed in range(2):
            gradient = gradients("heavy tail", world, ranks.numel, seed)[rank]
            opened = ranks.open(rank, gradient)
            updates.append(run_inline(opened.program, network).update)
            opened.account.settle(torch.tensor(False))
            ranks.steps += 1
        found[name] = torch.stack(updates).numpy()
    return found


@pytest.mark.parametrize("world", [3, 4, slow(8)])
def test_virtual_ranks_equal_a_real_group_bit_for_bit(pools, world):
    results = pools(world).run(same_job)
    for name, exchange in EXCHANGES.items():
        ranks = Ranks(exchange, world, SHAPES, 0.05, "bf16")
        for seed in range(2):
            step = ranks.step(gradients("heavy tail", world, ranks.numel, seed))
            for result in results:
                assert torch.equal(torch.from_numpy(result[name][seed]), step.update), name


@pytest.mark.parametrize("world", [3, slow(4)])
def test_replicas_stay_bit_identical(pools, world):
    results = pools(world).run(job, list(METHODS))
    for name in METHODS:
        prints = {result[name][0] for result in results}
        assert len(prints) == 1, name
        assert all(0 < result[name][2] < 0.05 for result in results), name
        assert all(result[name][1] > 0 and result[name][3] > 0 for result in results), name


def resume_job(rank, world, names):
    """Names whose parameters differ between six steps in one go and three + three over a saved state."""
    return [
        name
        for name in names
        if six_steps(rank, METHODS[name]) != three_and_three(rank, METHODS[name])
    ]


def six_steps(rank, method):
    ddp = DistributedDataParallel(make_cnn(), bucket_cap_mb=0.02)
    handle = tw.attach(ddp, method, deterministic=True)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), batches(rank, 6))
    handle.close()
    return fingerprint(ddp)


def three_and_three(rank, method):
    data = list(batches(rank, 6))
    saved = None
    for part in (data[:3], data[3:]):
        ddp = DistributedDataParallel(make_cnn(), bucket_cap_mb=0.02)
        handle = tw.attach(ddp, method, deterministic=True)
        if saved is not None:
            ddp.load_state_dict(saved[0])
            handle.load_state_dict(saved[1])
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), iter(part))
        saved = (ddp.state_dict(), handle.state_dict())
        handle.close()
    return fingerprint(ddp)


def test_resume_is_bit_exact_in_another_bucketing(pools):
    """DDP buckets the first step after a restart differently from the later ones."""
    names = ["OkTopK", "full", "published", "exclusive", "GTopK", "TopKDSA"]
    assert pools(3).run(resume_job, names) == [[], [], []]
