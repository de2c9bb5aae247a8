from __future__ import annotations

import pytest
import torch

from tests.exchange.ranks import Ranks, check_step, gradients
from thinwire.errors import UsageError
from thinwire.exchange.agreed import CyclicLeader
from thinwire.exchange.dsa import SplitGather
from thinwire.exchange.exclusive import Exclusive
from thinwire.exchange.gather import AllGatherFast
from thinwire.exchange.hierarchy import Hierarchical, Shards
from thinwire.exchange.reused import ReusedThresholds
from thinwire.exchange.split import SplitReduce
from thinwire.exchange.tree import TreeMerge
from thinwire.select.rows import RowTable
from thinwire.select.topk import AllDimensionTopK

OUTER = {
    "gather": AllGatherFast(),
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
    rows = [ranks.compressors[0].session.rows(slot, None) for slot in ranks.group.slots]
    shards = Shards(RowTable(rows, ranks.group.numel), per_host, torch.device("cpu"))
    seen = torch.cat(shards.positions)
    wanted = torch.cat([torch.arange(s.offset, s.offset + s.numel) for s in ranks.group.slots])
    assert torch.equal(seen.sort().values, wanted)
    for table in shards.tables:
        assert table.rows[0].length == 40
        assert table.rows[0].slot.shard.full_shape == (24, 40)


def test_dense_inside_and_full_density_between_is_the_plain_mean():
    ranks = Ranks(Hierarchical(outer=AllGatherFast(), per_host=2), 4, [(6, 50)], 1.0, per_host=2)
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


def gloo_job(rank, world):
    from torch.nn.parallel import DistributedDataParallel

    import thinwire as tw
    from tests.models import batches, fingerprint, make_cnn, train

    prints = []
    for outer in (SplitReduce(), Exclusive(), AllGatherFast()):
        ddp = DistributedDataParallel(make_cnn(), bucket_cap_mb=0.02)
        method = tw.TopK(density=0.02, exchange=Hierarchical(outer=outer, per_host=2))
        handle = tw.attach(ddp, method)
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), batches(rank, 5))
        held = handle.residual("6.weight")
        handle.close()
        prints.append((fingerprint(ddp), [bool(half.any()) for half in held.chunk(2)]))
    return prints


def test_two_hosts_of_two_on_gloo(pools):
    results = pools(4).run(gloo_job)
    for which in range(3):
        assert len({result[which][0] for result in results}) == 1
        # Local rank 0 holds the first half of a parameter, local rank 1 the second.
        assert [result[which][1] for result in results] == [[True, False], [False, True]] * 2


def test_settings_are_checked(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(UsageError, match="LOCAL_WORLD_SIZE is not set"):
        Hierarchical()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Hierarchical().per_host == 2
    with pytest.raises(UsageError, match="per_host is 3"):
        Ranks(Hierarchical(per_host=3), 4, [(100,)]).step(gradients("normal", 4, 100))
