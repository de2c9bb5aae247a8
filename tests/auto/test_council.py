"""Council: one rank decides, and none is left waiting."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from thinwire.auto.council import Council
from thinwire.auto.measuring import share_out
from thinwire.engine.network import place_in
from thinwire.errors import ExchangeError


def decide_job(rank: int, world: int) -> str:
    group = dist.group.WORLD
    assert group is not None
    council = Council(group, place_in(group))

    def refuse() -> str:
        raise KeyError("nothing fits")

    with pytest.raises(KeyError if rank == 0 else ExchangeError, match="nothing fits"):
        council.decide(refuse)
    return council.decide(lambda: f"of rank {rank}")


def test_all_ranks_have_what_the_first_decides_or_fail_with_it(pools):
    assert pools(2).run(decide_job) == ["of rank 0"] * 2


def share_job(rank: int, world: int) -> tuple[int, int]:
    group = dist.group.WORLD
    assert group is not None
    sharing = share_out(Council(group, place_in(group)), mark=(7.0, 5.0, 7.0)[rank])
    return sharing.workers, sharing.turn


def test_workers_on_one_device_take_turns(pools):
    assert pools(3).run(share_job) == [(2, 0), (2, 0), (2, 1)]
