"""Handles of models sharded over a 1-D mesh move to other groups of replicas, and new ones join."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from tests.contracts.cluster import sparse
from tests.sharded import are_replicas_equal, local, make_mesh, make_model, train


def residuals(handle: tw.Handle) -> dict[str, torch.Tensor]:
    return {row.info.name: handle.residual(row.info.name) for row in handle.plan()}


def share_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.broadcast(local(parameter.data), 0)


def same_ranks_job(rank: int, world: int) -> None:
    """Two shards: to another group of the same ranks, and to no other rank."""
    mesh = make_mesh(2, 2)
    model = make_model(mesh["shard"])
    handle = tw.attach(model, sparse(), process_group=mesh.get_group("replicate"))
    train(model, 3)
    before = residuals(handle)
    pairs = dist.new_group([0, 2]), dist.new_group([1, 3])
    handle.regroup(pairs[rank % 2])
    assert handle.reducer.driver.in_turn
    assert all(torch.equal(held, before[name]) for name, held in residuals(handle).items())
    train(model, [3, 4])
    assert handle.stats().steps == 5
    assert are_replicas_equal(model, mesh.get_group("replicate"))
    alone = [dist.new_group([one]) for one in range(world)]
    handle.regroup(alone[rank])
    train(model, [5])
    assert handle.world == 1
    handle.close()


def test_shards_move_to_another_group(sharded):
    sharded.run(same_ranks_job)


def other_ranks_job(rank: int, world: int) -> None:
    """Whole copies: two of four go on, two come back, two others are new and join."""
    model = make_model(make_mesh(4, 1)["shard"])
    handle = tw.attach(model, sparse(), process_group=dist.group.WORLD)
    train(model, 3)
    pair, everyone = dist.new_group([0, 1]), dist.group.WORLD
    if rank < 2:
        handle.regroup(pair)
        train(model, [3, 4])
        assert are_replicas_equal(model, pair)
    share_weights(model)
    handle.regroup(everyone)
    train(model, [5])
    assert are_replicas_equal(model, everyone) and handle.reducer.step == 6
    if rank < 2:
        handle.regroup(pair)
    else:
        handle.close()
        model = make_model(make_mesh(4, 1)["shard"])
    share_weights(model)
    if rank < 2:
        before = residuals(handle)
        handle.regroup(everyone)
        assert all(torch.equal(held, before[name]) for name, held in residuals(handle).items())
    else:
        handle = tw.attach(model, sparse(), process_group=everyone)
        handle.join()
        assert not any(held.any() for held in residuals(handle).values())
    train(model, [6, 7])
    assert are_replicas_equal(model, everyone) and handle.reducer.step == 8
    handle.close()


def test_replicas_leave_come_back_and_join(sharded):
    sharded.run(other_ranks_job)
