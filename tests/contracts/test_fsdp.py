"""Contracts 1 to 4 over the FSDP adapter: 2 replicas x 2 shards, six methods; and the jobs of the other adapters' tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire as tw
from tests.contracts.cluster import sparse
from tests.contracts.test_replicas import low_rank_job
from tests.contracts.test_state import distributed_save_job, resume_job
from tests.sharded import are_replicas_equal, make_mesh, make_model, train
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


def test_resume_is_bit_exact_when_deterministic(sharded, tmp_path):
    assert all(sharded.run(resume_job, "fsdp", str(tmp_path), 20.0))


def test_distributed_checkpoint_keeps_every_replicas_own_residual(sharded, tmp_path):
    helds = sharded.run(distributed_save_job, "fsdp", str(tmp_path))
    assert any((helds[0][name] != helds[2][name]).any() for name in helds[0])
