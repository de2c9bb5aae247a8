from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.exchange.ranks import Ranks, check_step, gradients
from thinwire.errors import UsageError
from thinwire.exchange.agreed import CyclicLeader
from thinwire.exchange.all_gather import AllGather
from thinwire.exchange.dsa import SplitGather
from thinwire.exchange.exclusive import Exclusive
from thinwire.exchange.hierarchy import Hierarchical, Shards, cut, shard_positions, shard_rows
from thinwire.exchange.requests import Place
from thinwire.exchange.reused import ReusedThresholds
from thinwire.exchange.split import SplitReduce
from thinwire.exchange.tree import TreeMerge
from thinwire.layout import RowTable, Shard, Slot, SlotKind
from thinwire.select.interleave import Interleaved
from thinwire.select.topk import AllDimensionTopK, TradTopK

OUTER = {
    "gather": AllGather(),
    "split": SplitReduce(),
    "reused": ReusedThresholds(tau=2, tau_prime=2),
    "exclusive": Exclusive(),
    "leader": CyclicLeader(),
    "dsa": SplitGather(),
    "tree": TreeMerge(),
}
SHAPES = [(24, 40), (7, 96), (5,), (1,)]


@pytest.mark.parametrize("per_host", [1, 2, 3])
@pytest.mark.parametrize("outer", OUTER)
def test_every_exchange_can_be_the_outer_part(outer, per_host):
    world = 2 * per_host
    exchange = Hierarchical(outer=OUTER[outer], per_host=per_host)
    for select in (None, AllDimensionTopK(0.05)):
        ranks = Ranks(exchange, world, SHAPES, 0.05, select=select, per_host=per_host)
        for seed, kind in enumerate(("normal", "ties", "one rank zero", "zero")):
            check_step(ranks.step(gradients(kind, world, ranks.numel, seed)), world, exact=False)


@pytest.mark.parametrize("per_host", [2, 3])
def test_shards_tile_the_group_by_whole_rows(per_host):
    ranks = Ranks(SplitReduce(), 1, SHAPES, select=AllDimensionTopK(0.05))
    rows = [ranks.compressors[0].session.selector.rows(slot) for slot in ranks.group.slots]
    shards = Shards(RowTable(rows, ranks.group.numel), rows, per_host, torch.device("cpu"))
    seen = torch.cat(shards.positions)
    wanted = torch.cat([torch.arange(s.offset, s.offset + s.numel) for s in ranks.group.slots])
    assert torch.equal(seen.sort().values, wanted)
    for table in shards.tables:
        assert table.rows[0].length == 40
        assert table.rows[0].slot.shard.full_shape == (24, 40)


SLOTS = {
    "rows": ((24, 40), (40, 1), "auto"),
    "along dim 0": ((24, 40), (40, 1), 0),
    "transposed": ((24, 40), (1, 24), "auto"),
    "channels last": ((6, 5, 3, 3), (45, 1, 15, 5), "auto"),
    "convolution along inputs": ((6, 5, 3, 3), (45, 9, 3, 1), 1),
    "fewer rows than ranks": ((2, 40), (40, 1), "auto"),
    "vector": ((7,), (1,), "auto"),
    "tiny": ((1,), (1,), "auto"),
}


@pytest.mark.parametrize("per_host", [1, 2, 3])
@pytest.mark.parametrize("case", SLOTS)
def test_a_shard_is_the_same_in_every_turn_and_all_of_them_tile_the_slot(case, per_host):
    shape, strides, axis = SLOTS[case]
    kind = SlotKind.CONV if len(shape) == 4 else SlotKind.LINEAR
    slot = Slot("w", shape, strides, 12, kind, Shard(shape))
    usual = AllDimensionTopK(0.1, axis).rows(slot)
    whole = TradTopK(0.1).rows(slot)
    flat = torch.arange(12 + slot.numel)
    for by in (usual, whole):
        seen = []
        for part in range(per_host):
            shard = cut(by, part, per_host)
            assert shard.shape == slot.part(flat, shard).shape
            wanted = slot.part(flat, shard).reshape(-1).sort().values
            for rows in (usual, whole) if by is usual else (whole,):
                positions = shard_positions(rows, shard)
                packed = shard_rows(rows, shard, part, per_host, 0)
                assert torch.equal(positions.sort().values, wanted)
                assert packed.count * packed.length == positions.numel()
                assert packed.entries > 0 or not positions.numel()
            # Only a slot with rows enough is cut between them, and then rows stay whole.
            if by is usual and usual.sizes and usual.sizes[0] >= per_host:
                assert shard_rows(usual, shard, part, per_host, 0).length == usual.length
                assert per_host == 1 or shard.dim == (1 if axis == 0 else 0)
            seen.append(wanted)
        assert torch.equal(torch.cat(seen).sort().values, flat[12:])


@pytest.mark.parametrize("axis", ["auto", 0])
def test_interleaved_turns_leave_shards_where_they_are(axis):
    select = Interleaved(AllDimensionTopK(0.05, axis), TradTopK(0.05), 2)
    ranks = Ranks(Hierarchical(per_host=2), 4, [(10, 50)], select=select, per_host=2)
    for seed in range(4):
        check_step(ranks.step(gradients("normal", 4, 500, seed)), 4, exact=False)
        for rank in range(4):
            rows = ranks.compressors[rank].session.selector.rows(ranks.group.slots[0], None)
            foreign = ranks.residual(rank).clone()
            slot = ranks.group.slots[0]
            shard = ranks.exchange.shard(rows, Place(rank, 4))
            held = slot.part(foreign, shard)
            assert bool(held.any())
            held.zero_()
            assert not bool(foreign.any())


def test_dense_inside_and_full_density_between_is_the_plain_mean():
    ranks = Ranks(Hierarchical(outer=AllGather(), per_host=2), 4, [(6, 50)], 1.0, per_host=2)
    inputs = gradients("integers", 4, 300)
    assert torch.equal(ranks.step(inputs).update, sum(inputs) / 4)


def test_only_the_shards_rank_holds_anything_back():
    ranks = Ranks(Hierarchical(per_host=2), 4, [(10, 50)], 0.02, per_host=2)
    ranks.step(gradients("normal", 4, 500))
    for rank in range(4):
        held = ranks.residual(rank).view(10, 50)
        foreign = held[5:] if rank % 2 == 0 else held[:5]
        assert not bool(foreign.any())


def test_traffic_between_hosts_is_a_shards():
    """The slow links carry 1/per_host of what a flat exchange would send."""
    ranks = Ranks(Hierarchical(outer=SplitReduce(), per_host=4), 8, [(8000,)], 0.05, per_host=4)
    step = ranks.step(gradients("normal", 8, 8000))
    rows = step.ledgers[0].rows()
    slow = sum(
        row.sent_bytes - row.control_bytes for key, row in rows.items() if "inside" not in key[0]
    )
    assert slow / 4 <= 6 * 100 * 1 / 2 * 1.01


def gloo_job(rank, world, per_host):
    from torch.nn.parallel import DistributedDataParallel

    import thinwire as tw
    from tests.models import batches, fingerprint, make_cnn, train

    # Six ranks are part of the pool of eight, which other tests have started already.
    group = dist.new_group(list(range(2 * per_host)))
    if rank >= 2 * per_host:
        return None
    prints = []
    outers = (SplitReduce(), Exclusive(), AllGather())
    for outer in outers[: 3 if per_host == 2 else 1]:
        ddp = DistributedDataParallel(make_cnn(), bucket_cap_mb=0.02, process_group=group)
        method = tw.TopK(density=0.02, exchange=Hierarchical(outer=outer, per_host=per_host))
        handle = tw.attach(ddp, method)
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), batches(rank, 3))
        held, shard = handle.residual("6.weight"), handle.shard("6.weight")
        whole = torch.zeros(shard.full_shape)
        whole.narrow(shard.dim, shard.offset, shard.size).copy_(held)
        saved = handle.state_dict()["ranks"][f"rank{rank}"]["memory"]["residual"]["6.weight"]
        bias = handle.shard("6.bias")
        handle.close()
        prints.append(
            (
                fingerprint(ddp),
                (shard.dim, shard.offset, tuple(held.shape)),
                bool(held.any()) and torch.equal(whole, saved),
                bias.size is None and bias.shape == (64,),
            )
        )
    return prints


@pytest.mark.parametrize(
    ("per_host", "parts"), [(2, [(0, 32), (32, 64)]), (3, [(0, 21), (21, 42), (42, 64)])]
)
def test_two_hosts_on_gloo(pools, per_host, parts):
    results = pools(4 if per_host == 2 else 8).run(gloo_job, per_host)[: 2 * per_host]
    for which in range(len(results[0])):
        assert len({result[which][0] for result in results}) == 1
        # Each local rank holds its rows of a parameter and nothing else; a dense parameter is whole.
        assert [result[which][1] for result in results] == [
            (0, start, (stop - start, 256)) for start, stop in parts
        ] * 2
        assert all(result[which][2] and result[which][3] for result in results)


def test_settings_are_checked(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(UsageError, match="LOCAL_WORLD_SIZE is not set"):
        Hierarchical()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Hierarchical().per_host == 2
    with pytest.raises(UsageError, match="per_host is 3"):
        Ranks(Hierarchical(per_host=3), 4, [(100,)]).step(gradients("normal", 4, 100))
