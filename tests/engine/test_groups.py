"""Private groups: their names are nobody else's, whatever groups a rank knows, and they go when they are released."""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.contracts.cluster import sparse
from tests.models import batches, fingerprint, make_cnn, train
from tests.sharded import are_replicas_equal, make_mesh, make_model
from tests.sharded import train as train_sharded
from thinwire.engine.groups import host_groups, private_group, release_groups
from thinwire.exchange.requests import BETWEEN, INSIDE


def known_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def test_this_torch_has_the_private_names_that_groups_use() -> None:
    c10d = dist.distributed_c10d
    named = inspect.signature(c10d._process_group_name)  # type: ignore[attr-defined]
    assert list(named.parameters) == ["ranks", "use_hashed_name"]
    assert "= _process_group_name(ranks, use_hashed_name=use_local" in inspect.getsource(c10d)
    assert hasattr(c10d._world, "pg_map")


def twins_job(rank: int, world: int) -> list[str]:
    """Rank 0 knows more groups than the others; twins come, go and come again."""
    dist.new_group([0])
    pair = dist.new_group([0, 2])
    if rank == 1:
        return []
    before, names = known_groups(), []
    for _ in range(2):
        twin = private_group(pair)
        names.append(twin.group_name)
        parts = host_groups(twin, 1)
        assert dist.get_process_group_ranks(parts[INSIDE]) == [rank]
        assert dist.get_process_group_ranks(parts[BETWEEN]) == [0, 2]
        for group in (twin, parts[BETWEEN]):
            found = torch.tensor([float(rank)])
            dist.all_reduce(found, group=group)
            assert found == 2.0
        release_groups({"twin": twin, **parts})
        assert known_groups() == before
    return names


def test_twins_of_a_subgroup_have_names_of_their_own_and_are_released(pools):
    first, outside, last = pools(3).run(twins_job)
    assert first == last and len(set(first)) == 2 and not outside


def pairs_job(rank: int, world: int) -> bytes:
    """DDP over pairs of ranks, of which one rank knows a group more."""
    dist.new_group([0])
    pairs = dist.new_group([0, 1]), dist.new_group([2, 3])
    ddp = DistributedDataParallel(make_cnn(), process_group=pairs[rank // 2])
    before = known_groups()
    handle = tw.attach(ddp, sparse())
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), batches(rank, 2))
    handle.close()
    assert known_groups() == before
    return fingerprint(ddp)


def test_attach_where_ranks_know_different_numbers_of_groups(pools):
    prints = pools(4).run(pairs_job)
    assert prints[0] == prints[1] != prints[2] == prints[3]


def sharded_job(rank: int, world: int) -> None:
    dist.new_group([0, 1])
    mesh = make_mesh(2, 2)
    model = make_model(mesh)
    handle = tw.attach(model, sparse())
    train_sharded(model, 2)
    assert are_replicas_equal(model, mesh.get_group("replicate"))
    handle.close()


def test_sharded_models_attach_where_ranks_know_different_numbers_of_groups(sharded):
    sharded.run(sharded_job)


def moving_job(rank: int, world: int) -> bytes | None:
    """Ranks 0 and 1 move to a group of their own; then one of them goes on with rank 2, which has not moved."""
    model = make_cnn()
    optimizer = tw.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model=model, method=sparse()
    )
    train(model, optimizer, batches(rank, 2))
    early, late = dist.new_group([0, 1]), dist.new_group([1, 2])
    if rank < 2:
        optimizer.handle.regroup(early)
        train(model, optimizer, batches(rank, 2))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 1)
    if rank == 0:
        return None
    optimizer.handle.regroup(late)
    train(model, optimizer, batches(rank, 2))
    return fingerprint(model)


def test_a_handle_moves_on_where_ranks_know_different_numbers_of_groups(pools):
    left, first, second = pools(3).run(moving_job)
    assert left is None and first == second
