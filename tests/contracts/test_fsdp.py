"""Contracts 1 to 4 over the FSDP adapter: 2 replicas x 2 shards, six methods; and the jobs of the other adapters' tests."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire as tw
from tests.contracts.cluster import sparse
from tests.contracts.test_replicas import low_rank_job
from tests.contracts.test_state import distributed_save_job, resume_job
from tests.lanes import mostly_slow
from tests.sharded import (
    are_replicas_equal,
    batch,
    local,
    loss_of,
    make_mesh,
    make_model,
    poison_token,
    train,
)
from thinwire.layout import Bucket

OFTEN = {"density": 0.05, "dense_fallback": False}
METHODS: dict[str, Any] = {
    "ADTopK": sparse(),
    "TopK": tw.TopK(values="bf16", **OFTEN),
    "OkTopK": tw.OkTopK(**OFTEN),
    "ExclusiveTopK": tw.ExclusiveTopK(**OFTEN),
    "PowerSGD": tw.PowerSGD(rank=2, dense_fallback=False),
    "ACPSGD": tw.ACPSGD(rank=2, dense_fallback=False),
}


class Spy:
    """Keeps what a handle's reducer is given and gives back, in one step."""

    def __init__(self, handle: tw.Handle) -> None:
        self.given: dict[str, Tensor] = {}
        self.buckets: list[Bucket] = []
        reducer = handle.reducer
        reduce = reducer.reduce

        def spy(bucket: Bucket, *rest: Any) -> Any:
            self.buckets.append(bucket)
            slots = bucket.layout.slots
            self.given |= {slot.name: slot.view(bucket.flat).double().clone() for slot in slots}
            return reduce(bucket, *rest)

        reducer.reduce = spy  # type: ignore[method-assign]

    def updates(self) -> dict[str, Tensor]:
        return {
            slot.name: slot.view(bucket.flat).double()
            for bucket in self.buckets
            for slot in bucket.layout.slots
        }


def contracts_job(rank: int, world: int, method: Any, options: dict[str, Any]) -> None:
    """Replicas stay bit-identical (1), and over the replicas nothing is lost (2)."""
    mesh = make_mesh(2, 2)
    replicas = mesh.get_group("replicate")
    model = make_model(mesh, **options)
    handle = tw.attach(model, method)
    spy = Spy(handle)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compressed = [row.info.name for row in handle.plan() if not row.dense]
    assert len(compressed) >= 4
    for step in range(6):
        held = {name: handle.residual(name).double() for name in compressed}
        spy.given, spy.buckets = {}, []
        # What waits for the end of a backward is delivered all the same.
        handle.reducer.keep_quiet(step % 2)
        train(model, [step], optimizer=optimizer)
        updates = spy.updates()
        for name in compressed:
            c = held[name] + spy.given[name]
            kept = handle.residual(name).double()
            sums = torch.stack([c, kept])
            dist.all_reduce(sums, group=replicas)
            error = (2 * updates[name] + sums[1] - sums[0]).abs().sum()
            assert error <= 2e-6 * sums[0].abs().sum(), (name, step)
        assert are_replicas_equal(model, replicas)
    stats = handle.stats()
    assert stats.steps == 6 and stats.ratio > 1
    handle.close()


@pytest.mark.parametrize("name", METHODS)
def test_replicas_are_identical_and_nothing_is_lost(sharded, name):
    sharded.run(contracts_job, METHODS[name], {})


def test_replicas_of_low_rank_methods_in_one_model(sharded):
    results = sharded.run(low_rank_job, "fsdp")
    assert len(set(results[0])) == 40, "the parameters must move"
    assert all(result == results[0] for result in results)


def bad_shard_job(rank: int, world: int, method: Any, skipped: str, scaled: bool) -> None:
    """A gradient that is not finite in one shard of one replica (3): all ranks skip, and memory is what it was."""
    mesh = make_mesh(2, 2)
    model = make_model(mesh)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
    handle = tw.attach(model, method, grad_scaler=scaler, skippable=not scaled, skipped=skipped)
    names = [row.info.name for row in handle.plan() if not row.dense]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        bad = step == 2
        ids = batch(rank, step).clamp(max=29)
        before = {name: handle.residual(name) for name in names}
        if bad and rank == 3:
            ids[0, 0] = 30
            poison_token(model, 30, ids)
        scaler.scale(loss_of(model, ids)).backward()
        held = {name: handle.residual(name) for name in names}
        assert all(values.isfinite().all() for values in held.values())
        if bad:
            assert all(local(p.grad).isnan().all() for p in model.parameters())
            same = all(torch.equal(held[name], before[name]) for name in names)
            assert same == (skipped == "forget")
        else:
            assert all(local(p.grad).isfinite().all() for p in model.parameters())
        if scaled or not bad:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == (32.0 if scaled else 1.0)
    assert are_replicas_equal(model, mesh.get_group("replicate"))
    handle.close()


BAD_SHARDS = list(itertools.product(METHODS, ["forget", "keep"], [True, False]))
FAST = {("ADTopK", "forget", True), ("ADTopK", "keep", True), ("PowerSGD", "forget", False)}


@pytest.mark.parametrize("case", mostly_slow(BAD_SHARDS, FAST.__contains__), ids=str)
def test_a_bad_gradient_in_one_shard_is_seen_by_all(sharded, case):
    name, skipped, scaled = case
    sharded.run(bad_shard_job, METHODS[name], skipped, scaled)


@pytest.mark.parametrize("name", mostly_slow(METHODS, {"ADTopK", "OkTopK"}.__contains__))
def test_resume_is_bit_exact_when_deterministic(sharded, tmp_path, name):
    assert all(sharded.run(resume_job, "fsdp", str(tmp_path), 20.0, METHODS[name]))


def test_distributed_checkpoint_keeps_every_replicas_own_residual(sharded, tmp_path):
    helds = sharded.run(distributed_save_job, "fsdp", str(tmp_path))
    assert any((helds[0][name] != helds[2][name]).any() for name in helds[0])
