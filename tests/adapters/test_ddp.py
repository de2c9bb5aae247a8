from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.models import batches, fingerprint, make_cnn, train

METHODS = [tw.Dense(), tw.TopK(density=0.05), tw.ADTopK(density=0.05)]


def replicas_job(rank: int, world: int, method: tw.Dense, steps: int) -> bytes:
    ddp = DistributedDataParallel(make_cnn(), bucket_cap_mb=0.02)
    handle = tw.attach(ddp, method)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), batches(rank, steps))
    assert handle.stats().steps == steps
    handle.close()
    return fingerprint(ddp)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_replicas_stay_bit_identical_over_200_steps(pools, world, method):
    prints = pools(world).run(replicas_job, method, 200)
    assert len(set(prints)) == 1
