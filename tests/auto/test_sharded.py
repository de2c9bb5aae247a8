"""tw.Auto between the replicas of a sharded model: told the optimizer, it compresses as it does under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from tests.auto.workers import Brake, Model, auto
from tests.sharded import are_replicas_equal, make_mesh

pytestmark = pytest.mark.timeout(300)
SLOW = 5e6
"""Bytes per second: a dense step takes most of a second, a step of the model a few milliseconds."""


def make_sharded() -> Any:
    mesh = make_mesh(2, 2)
    model = Model(width=256)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: Any, optimizer: torch.optim.Optimizer, handle: tw.Handle) -> int:
    """Steps until Auto has settled."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(40):
        if handle.advise().settled:
            return step
        optimizer.zero_grad()
        model(torch.randn(16, 256, generator=generator)).square().mean().backward()
        optimizer.step()
    raise AssertionError(f"not settled: {handle.advise()}")


def settle_job(rank: int, world: int, kind: str) -> str:
    model = make_sharded()
    optimizer: torch.optim.Optimizer
    if kind == "adam":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    handle = tw.attach(model, auto(), optimizer=optimizer)
    Brake(handle, SLOW)
    train(model, optimizer, handle)
    chosen = handle.advise().chosen
    assert are_replicas_equal(model, make_mesh(2, 2).get_group("replicate"))
    handle.close()
    return chosen.name if chosen is not None else "dense"


@pytest.mark.parametrize(
    ("kind", "allowed"),
    [("adam", ("int",)), pytest.param("sgd", ("dgc", "topk", "adtopk"), marks=pytest.mark.slow)],
)
def test_all_shards_are_sent_in_one_way_that_is_safe_for_the_optimizer(sharded, kind, allowed):
    chosen = sharded.run(settle_job, kind)
    assert len(set(chosen)) == 1 and chosen[0].startswith(allowed), chosen
