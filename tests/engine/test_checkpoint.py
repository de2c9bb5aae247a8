"""Reading the states of ranks back into the same or another number of ranks."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import thinwire as tw
from tests.contracts.cluster import Cluster, same_bits, sparse
from thinwire.engine.checkpoint import mean_tensor, pick_rank, read_distributed, wrap_rank
from thinwire.memory.momentum import MomentumCorrection


def state_of(rank: int, world: int, value: float) -> dict:
    memory = {"residual": {"a.weight": torch.full((2, 2), value)}}
    content = {"step": 5, "steps": {"a.weight": 5}, "memory": memory, "selection": {}}
    return wrap_rank(rank, world, content)


def test_state_is_plain_tensors_and_numbers():
    stream = io.BytesIO()
    torch.save(state_of(1, 2, 3.0), stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    assert pick_rank([loaded], 1, 2, None)["step"] == 5


def test_each_rank_gets_its_own_state_out_of_all():
    states = [state_of(rank, 3, float(rank)) for rank in range(3)]
    for rank in range(3):
        for given in (states, [states[rank]]):
            content = pick_rank(given, rank, 3, None)
            assert content["memory"]["residual"]["a.weight"].unique().item() == rank


def test_another_world_gets_the_mean_or_nothing_and_must_say_which():
    states = [state_of(rank, 4, float(rank)) for rank in range(4)]
    mean = pick_rank(states, 1, 2, "mean")
    assert mean["memory"]["residual"]["a.weight"].unique().item() == 1.5
    assert mean["step"] == 5
    assert pick_rank(states, 1, 2, "reset")["memory"] == {}
    for wrong in (None, "sum"):
        with pytest.raises(tw.UsageError, match=f"on_world_change is {wrong!r}, it must be"):
            pick_rank(states, 0, 2, wrong)
    with pytest.raises(tw.UsageError, match="needs the states of all 4 ranks"):
        pick_rank(states[1:], 0, 2, "mean")
    with pytest.raises(tw.UsageError, match="different world sizes"):
        pick_rank([states[0], state_of(0, 3, 0.0)], 0, 2, "mean")


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"version": 3}, "version 3; this thinwire reads versions 1 and 2"),
        ({}, "dict and without a version; it must be what handle"),
        (3, "class int and without"),
        (None, "class NoneType and without"),
    ],
)
def test_what_is_no_state_is_refused(state, told):
    with pytest.raises(tw.UsageError, match=told):
        pick_rank([state], 0, 1, None)


def test_mean_keeps_the_dtype_and_adds_in_double():
    big = torch.tensor([1e8], dtype=torch.float32)
    small = torch.tensor([1.0], dtype=torch.float32)
    mean = mean_tensor([big, small, -big, small])
    assert mean.dtype == torch.float32 and mean.item() == 0.5


class App:
    """A user's own Stateful with the handle's state somewhere inside."""

    def __init__(self, state: dict) -> None:
        self.state = state

    def state_dict(self) -> dict:
        return {"epoch": 3, "training": {"exchange": self.state}}

    def load_state_dict(self, state: dict) -> None: ...


def test_distributed_checkpoint_is_found_wherever_the_user_put_it(tmp_path):
    dcp.save({"app": App(state_of(0, 1, 7.0))}, checkpoint_id=tmp_path, no_dist=True)
    content = read_distributed(tmp_path, 0, 1, None)
    assert content["memory"]["residual"]["a.weight"].unique().item() == 7.0
    assert content["step"] == 5 and content["steps"] == {"a.weight": 5}
    assert read_distributed(tmp_path, 1, 3, "reset")["memory"] == {}
    assert read_distributed(tmp_path, 2, 3, "mean")["memory"]["residual"]["a.weight"].any()


def test_checkpoint_without_a_handle_is_refused(tmp_path):
    dcp.save({"weights": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(tw.UsageError, match="holds no thinwire state"):
        read_distributed(tmp_path, 0, 1, None)


def test_state_taken_in_mid_step_continues_like_the_original():
    """Saved after backward: the pending verdict is in the state, the next step is the same."""
    original, copy = (Cluster(2, sparse("bf16")) for _ in range(2))
    for seed in range(3):
        original.step(original.random(seed))
    copy.buckets = [["head"], ["scalar", "linear", "bias", "conv"]]
    for ours, theirs in zip(copy.reducers, original.reducers, strict=True):
        theirs.settle()
        ours.load_state_dict(theirs.state_dict())
    gradients = original.random(9)
    ours, theirs = copy.step(gradients)[1], original.step(gradients)[1]
    assert all(same_bits(ours[name], theirs[name]) for name in theirs)
    assert all(
        same_bits(copy.residuals(1)[name], held) for name, held in original.residuals(1).items()
    )


def test_load_replaces_a_pending_flush():
    """A flush that was delivered but not closed must not end the flush of the loaded state."""
    cluster = Cluster(1, sparse())
    cluster.step(cluster.random(0))
    (reducer,) = cluster.reducers
    saved = reducer.state_dict()
    held = cluster.residuals(0)["linear"]
    cluster.switch(tw.Dense())
    cluster.step(cluster.random(1))
    reducer.load_state_dict(saved)
    assert same_bits(cluster.residuals(0)["linear"], held)
    gradients = cluster.random(2)
    sent = cluster.step(gradients)[0]["linear"]
    torch.testing.assert_close(sent, held + gradients[0]["linear"])


VERSION_1 = torch.load(Path(__file__).parent / "states" / "version1.pt", weights_only=True)
"""By method: the states of two ranks after six steps, as thinwire 0.0 saved them, and the updates of the next three."""
METHODS = {
    "adtopk": tw.ADTopK(density=0.1, dense_fallback=False),
    "adtopk-threshold": tw.ADTopK(
        density=0.1,
        interleave=2,
        threshold=True,
        monitor=tw.select.Monitor(warmup=1),
        dense_fallback=False,
    ),
    "dgc": tw.DGC(density=0.1, memory=MomentumCorrection(0.9, False), dense_fallback=False),
    "randomk": tw.RandomK(density=0.1, dense_fallback=False),
    "oktopk": tw.OkTopK(density=0.1, dense_fallback=False),
    "oktopk-published": tw.OkTopK(density=0.1, thresholds="published", dense_fallback=False),
    "powersgd": tw.PowerSGD(rank=2, dense_fallback=False),
    "acpsgd": tw.ACPSGD(rank=2, dense_fallback=False),
}


CHANGED_SINCE = {"oktopk", "randomk"}
"""What comes after the state is another choice now: OkTopK fills few entries by magnitude, RandomK draws places by hashes."""
PRODUCTS = {"powersgd", "acpsgd"}
"""Matrix products have other bits on other processors than the one that the states were saved on."""


@pytest.mark.parametrize("name", VERSION_1)
def test_state_of_version_1_goes_on_bit_for_bit(name):
    saved = VERSION_1[name]
    shapes = {n: tuple(update.shape) for n, update in saved["later"][0].items()}
    cluster = Cluster(2, METHODS[name], shapes=shapes, deterministic=True)
    for rank, reducer in enumerate(cluster.reducers):
        reducer.load_state_dict(pick_rank(saved["states"], rank, 2, None))
    for rank in range(2):
        held = saved["states"][rank]["ranks"][f"rank{rank}"]["memory"]["residual"]
        assert all(torch.equal(cluster.residuals(rank)[n], held[n]) for n in shapes if n in held)
    if name in CHANGED_SINCE:
        return
    for step, expected in enumerate(saved["later"], start=6):
        for update in cluster.step(cluster.random(step)):
            for n in shapes:
                most = 1e-5 * expected[n].abs().max().item() if name in PRODUCTS else 0.0
                torch.testing.assert_close(update[n], expected[n], rtol=0.0, atol=most)
