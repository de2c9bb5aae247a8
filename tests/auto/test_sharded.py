"""tw.Auto between the replicas of a sharded model: told the optimizer, it compresses as it does under DDP."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from tests.auto.workers import Brake, Model, auto
from tests.sharded import are_replicas_equal, make_mesh

pytestmark = pytest.mark.timeout(300)
WIDTH = 255
"""Shards of unequal size."""
SLOW = 5e6
"""Bytes per second: a dense step takes most of a second, a step of the model a few milliseconds."""


def make_sharded() -> Any:
    mesh = make_mesh(2, 2)
    model = Model(width=WIDTH)
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
        model(torch.randn(16, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
    raise AssertionError(f"not settled: {handle.advise()}")


def make_job(kind: str) -> tuple[Any, torch.optim.Optimizer, tw.Handle]:
    model = make_sharded()
    optimizer: torch.optim.Optimizer
    if kind == "adam":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        quality = "safe"
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        quality = "balanced"
    handle = tw.attach(model, auto(quality=quality), optimizer=optimizer)
    Brake(handle, SLOW)
    return model, optimizer, handle


def settle_job(rank: int, world: int, kind: str, folder: str) -> str:
    model, optimizer, handle = make_job(kind)
    train(model, optimizer, handle)
    chosen = handle.advise().chosen
    assert are_replicas_equal(model, make_mesh(2, 2).get_group("replicate"))
    if kind == "adam":
        dcp.save({"thinwire": handle}, checkpoint_id=folder)
        check_resumed(handle, folder)
    handle.close()
    return chosen.name if chosen is not None else "dense"


def check_resumed(saved: tw.Handle, folder: str) -> None:
    """All shards do as was decided, with what was held back; one that would measure alone would wait for the others."""
    model, optimizer, handle = make_job("adam")
    handle.load_checkpoint(folder)
    assert handle.advise().settled and plan_of(handle) == plan_of(saved)
    held = [handle.residual(name) for name in handle.reducer.parameters]
    kept = [saved.residual(name) for name in saved.reducer.parameters]
    assert all(map(torch.equal, held, kept)) and any(one.any() for one in held)
    optimizer.zero_grad()
    model(torch.ones(4, WIDTH)).square().mean().backward()
    handle.close()
    model, optimizer, handle = make_job("adam")
    dcp.load({"thinwire": handle}, checkpoint_id=folder)
    assert handle.advise().settled and plan_of(handle) == plan_of(saved)
    handle.close()


def plan_of(handle: tw.Handle) -> list[str]:
    return [row.action for row in handle.plan()]


@pytest.mark.parametrize(
    ("kind", "allowed"),
    [("adam", "int"), pytest.param("sgd", "topk|adtopk|int|bf16", marks=pytest.mark.slow)],
)
def test_all_shards_are_sent_in_one_way_that_its_class_allows(sharded, tmp_path, kind, allowed):
    chosen = sharded.run(settle_job, kind, str(tmp_path))
    # Units may be sent in different ways, as "3 x int4 + 1 x int8"; a fast one may stay dense.
    ways = [re.sub(r"^\d+ x ", "", part) for part in chosen[0].split(" + ")]
    assert len(set(chosen)) == 1 and set(ways) != {"dense"}, chosen
    assert all(re.match(f"dense|{allowed}", way) for way in ways), chosen
