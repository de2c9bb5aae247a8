from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster, same_bits
from thinwire.engine.virtual import run_virtual
from thinwire.errors import UsageError
from thinwire.exchange.majority import pack_bits, unpack_bits, vote_by_majority
from thinwire.exchange.requests import Place
from thinwire.memory.residual import Residual
from thinwire.methods.signsgd import SignSGD

SHAPES = {"linear": (33, 40), "bias": (8,)}


def test_bits_survive_packing():
    bits = torch.rand(3, 64, generator=torch.Generator().manual_seed(0)) > 0.5
    assert pack_bits(bits).shape == (3, 8) and torch.equal(unpack_bits(pack_bits(bits)), bits)


@pytest.mark.parametrize("abstain", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("n", [1, 9, 1000])
def test_vote_is_the_sign_of_the_sum_of_signs(world, n, abstain):
    generator = torch.Generator().manual_seed(n)
    values = [torch.randint(-1, 2, (n,), generator=generator).float() for _ in range(world)]
    verdicts = run_virtual(
        [
            vote_by_majority(values[rank], Place(rank, world), abstain, "signs")
            for rank in range(world)
        ]
    )
    votes = values if abstain else [torch.where(v >= 0, 1.0, -1.0) for v in values]
    expected = torch.stack(votes).sum(0).sign()
    if not abstain:
        expected = torch.where(expected >= 0, 1.0, -1.0)
    assert all(torch.equal(verdict, expected) for verdict in verdicts)


def test_update_is_the_majority_and_dense_slots_follow():
    cluster = Cluster(3, SignSGD(), shapes=SHAPES)
    gradients = cluster.random(0)
    for rank in range(3):
        gradients[rank]["linear"][0] = 0
    updates = cluster.step(gradients)
    expected = sum(g["linear"].sign() for g in gradients).sign()
    assert all(same_bits(update["linear"], expected) for update in updates)
    assert not updates[0]["linear"][0].any()
    assert same_bits(updates[0]["bias"], (sum(g["bias"] for g in gradients) / 3).sign())


def test_unused_slot_gets_no_vote():
    cluster = Cluster(2, SignSGD(abstain=False), shapes=SHAPES)
    gradients = cluster.random(0)
    for rank in range(2):
        gradients[rank]["linear"].zero_()
    assert not cluster.step(gradients)[0]["linear"].any()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_error_feedback_sends_scaled_signs_and_keeps_the_rest(world):
    cluster = Cluster(world, SignSGD(memory=Residual()), shapes=SHAPES)
    for step in range(5):
        before = [cluster.residuals(r)["linear"] for r in range(world)]
        gradients = cluster.random(step)
        update = cluster.step(gradients)[0]["linear"]
        after = [cluster.residuals(r)["linear"] for r in range(world)]
        c = [before[r] + gradients[r]["linear"] for r in range(world)]
        sent = [torch.where(x >= 0, 1.0, -1.0) * x.abs().mean() for x in c]
        torch.testing.assert_close(update, sum(sent) / world)
        for rank in range(world):
            torch.testing.assert_close(after[rank], c[rank] - sent[rank])
        total = world * update.double() + sum(after).double()
        assert (total - sum(c).double()).abs().sum() <= 1e-6 * sum(x.abs().sum() for x in c)


def test_error_feedback_survives_bad_steps_unused_slots_and_discards():
    cluster = Cluster(2, SignSGD(memory=Residual()), shapes=SHAPES)
    gradients = cluster.random(0)
    finite = gradients[0]["linear"].clone()
    gradients[1]["linear"][0, 0] = torch.inf
    assert cluster.step(gradients)[0]["bias"].isnan().all()
    torch.testing.assert_close(cluster.residuals(0)["linear"], finite)
    assert cluster.residuals(1)["linear"].isfinite().all()
    nothing = [{n: torch.zeros(s) for n, s in SHAPES.items()} for _ in range(2)]
    before = cluster.residuals(0)["linear"]
    assert not cluster.step(nothing)[0]["linear"].any()
    torch.testing.assert_close(cluster.residuals(0)["linear"], before)
    gradients = cluster.random(1)
    cluster.step(gradients)
    cluster.residuals(0)
    cluster.reducers[0].settle(discard=True)
    torch.testing.assert_close(cluster.residuals(0)["linear"], before + gradients[0]["linear"])


def test_vote_keeps_its_size_under_a_loss_scale():
    cluster = Cluster(2, SignSGD(), shapes=SHAPES, scale=lambda: torch.tensor(1024.0))
    update = cluster.step(cluster.random(0, factor=1024.0))[0]
    assert set((update["linear"] / 1024).unique().tolist()) <= {-1.0, 0.0, 1.0}
    assert set((update["bias"] / 1024).unique().tolist()) <= {-1.0, 0.0, 1.0}


def test_other_memories_are_refused():
    for memory in (Residual(storage="int8"), tw.memory.NoMemory):
        with pytest.raises(UsageError, match="memory"):
            SignSGD(memory=memory)
