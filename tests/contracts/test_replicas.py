"""Contract 1: replicas stay bit-identical. Contract 5: only what was handed over is touched."""

from __future__ import annotations

import hashlib

import pytest
import torch

import thinwire as tw
from tests.contracts.adapters import ADAPTERS, make
from tests.lanes import slow
from tests.models import batches, fingerprint, make_cnn, train

# Both selections, a narrow dense part and plain dense slots side by side in one model.
POLICY = [
    tw.rule("0.*", dense=True),
    tw.rule("3.*", method=tw.TopK(density=0.05)),
    tw.rule("8.bias", method=tw.Dense(dtype=torch.bfloat16)),
]


def replicas_job(rank: int, world: int, adapter: str) -> list[str]:
    torch.manual_seed(rank)
    random_state = torch.get_rng_state()
    model = make_cnn()
    torch.set_rng_state(random_state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # fp32 values: sums of bf16 values are mostly exact in any order, which would hide a wrong one.
    method = tw.ADTopK(density=0.05, values="fp32")
    module, optimizer, handle = make(adapter, model, optimizer, method, policy=POLICY)
    prints: list[str] = []
    train(
        module,
        optimizer,
        batches(rank, 200),
        lambda _: prints.append(hashlib.sha1(fingerprint(model)).hexdigest()),
    )
    stats = handle.stats()
    assert stats.steps == 200
    assert world == 1 or (stats.ratio > 1 and 0.04 < stats.density < 0.06)
    assert torch.equal(random_state, torch.get_rng_state()), "the global random state was used"
    handle.close()
    return prints


def low_rank_job(rank: int, world: int, adapter: str) -> list[str]:
    """Both low-rank methods in one model, their dense parts in the same buckets."""
    torch.manual_seed(rank)
    model = make_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    method = tw.PowerSGD(rank=2, min_compression_rate=1.0)
    policy = [tw.rule("6.*", method=tw.ACPSGD(rank=2))]
    module, optimizer, handle = make(adapter, model, optimizer, method, policy=policy)
    assert sum(not row.dense for row in handle.plan()) >= 3
    prints: list[str] = []
    train(
        module,
        optimizer,
        batches(rank, 40),
        lambda _: prints.append(hashlib.sha1(fingerprint(model)).hexdigest()),
    )
    handle.close()
    return prints


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_replicas_of_low_rank_methods_are_bit_identical_after_each_step(pools, adapter):
    results = pools(3).run(low_rank_job, adapter)
    assert len(set(results[0])) == 40, "the parameters must move"
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(
    ("adapter", "world"),
    [
        *(("ddp", 3), *(slow("ddp", world) for world in (1, 2, 4))),
        *(slow("optimizer", world) for world in (1, 2, 3, 4)),
    ],
)
def test_replicas_are_bit_identical_after_each_of_200_steps(pools, adapter, world):
    results = pools(world).run(replicas_job, adapter)
    assert len(set(results[0])) == 200, "the parameters must move"
    assert all(result == results[0] for result in results)
