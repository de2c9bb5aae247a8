"""State of sharded models: one checkpoint holds all shards, and others can read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import thinwire as tw
from tests.contracts.cluster import sparse
from tests.sharded import make_mesh, make_model, place_columns, train, weights

METHODS = [sparse("bf16"), tw.PowerSGD(rank=2, dense_fallback=False)]


def whole(handle: tw.Handle) -> dict[str, Tensor]:
    """What is held back on this replica, all shards together."""
    memory = handle.state_dict()["ranks"][f"rank{handle.rank}"]["memory"]["residual"]
    return {name: held.full_tensor() for name, held in memory.items()}


def save_job(rank: int, world: int, method: Any, folder: str, options: Any) -> Any:
    """Train, save, train on; then resume in a model of the same shards."""
    mesh = make_mesh(2, 2)
    model = make_model(mesh, **options)
    handle = tw.attach(model, method, deterministic=True)
    optimizer = train(model, 3)
    held = whole(handle)
    assert all(isinstance(one, Tensor) for one in held.values())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "thinwire": handle}
    dcp.save(state, checkpoint_id=folder)
    torch.save(handle.state_dict(), Path(folder) / f"handle{rank}.pt")
    train(model, [3, 4], optimizer=optimizer)
    through = weights(model)
    handle.close()

    model = make_model(mesh, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = tw.attach(model, method, deterministic=True)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "thinwire": handle}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert all(torch.equal(held[name], now) for name, now in whole(handle).items())
    train(model, [3, 4], optimizer=optimizer)
    assert torch.equal(weights(model), through)
    own = torch.load(Path(folder) / f"handle{rank}.pt", weights_only=True)
    handle.load_state_dict(own)
    assert all(torch.equal(held[name], now) for name, now in whole(handle).items())
    dist.barrier()
    other = torch.load(Path(folder) / f"handle{rank ^ 1}.pt", weights_only=True)
    with pytest.raises(tw.UsageError, match=r"state belongs to shard \d of 2, this is shard"):
        handle.load_state_dict(other)
    handle.close()
    return {name: values.numpy() for name, values in held.items()} if rank % 2 == 0 else None


def load_job(rank: int, world: int, shape: tuple[int, int], saved: Any) -> None:
    """Checkpoints of 2 x 2 in a model of other replicas and shards."""
    replicas, _ = shape
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for method, folder, helds in saved:
        model = make_model(mesh)
        handle = tw.attach(model, method)
        with pytest.raises(BaseException, match=r"others is read by handle\.load_checkpoint\(path"):
            dcp.load({"thinwire": handle}, checkpoint_id=folder)
        handle.load_checkpoint(folder, on_world_change="mean")
        means = {name: (helds[0][name] + helds[1][name]) / 2 for name in helds[0]}
        expected = helds[handle.rank] if replicas == 2 else means
        for name, held in whole(handle).items():
            difference = (held - torch.from_numpy(expected[name])).abs().max()
            assert difference <= (0 if replicas == 2 else 1e-6)
        assert handle.stats().steps == 3
        train(model, 1)
        handle.close()


def test_a_checkpoint_of_2_x_2_is_read_by_the_same_and_by_other_shards(sharded, pools, tmp_path):
    saved = []
    for number, method in enumerate(METHODS):
        folder = str(tmp_path / str(number))
        helds = [one for one in sharded.run(save_job, method, folder, {}) if one is not None]
        assert any((helds[0][name] != helds[1][name]).any() for name in helds[0])
        saved.append((method, folder, helds))
    pools(2).run(load_job, (2, 1), saved)
    for shape in [(4, 1), (1, 4)]:
        sharded.run(load_job, shape, saved)


def test_column_shards_are_saved_and_loaded(sharded, tmp_path):
    options = {"shard_placement_fn": place_columns}
    sharded.run(save_job, sparse("bf16"), str(tmp_path), options)


def from_ddp_job(rank: int, world: int, folder: str) -> None:
    """What DDP has saved is read by shards: the names are the same."""
    from torch.nn.parallel import DistributedDataParallel

    from tests.sharded import TinyModel

    torch.manual_seed(0)
    ddp = DistributedDataParallel(TinyModel())
    handle = tw.attach(ddp, sparse())
    train(ddp, 2)
    dcp.save({"thinwire": handle}, checkpoint_id=folder)
    held = {row.info.name: handle.residual(row.info.name) for row in handle.plan() if not row.dense}
    mean = {}
    for name, values in held.items():
        mean[name] = values.double()
        dist.all_reduce(mean[name])
    handle.close()
    sharded = tw.attach(make_model(make_mesh(2, 2)), sparse())
    sharded.load_checkpoint(folder, on_world_change="mean")
    for name, values in whole(sharded).items():
        assert isinstance(values, Tensor) and not isinstance(values, DTensor)
        assert torch.allclose(values.double(), mean[name] / world, atol=1e-6)
    sharded.close()


def test_what_ddp_has_saved_is_read_by_shards(sharded, tmp_path):
    sharded.run(from_ddp_job, str(tmp_path))
