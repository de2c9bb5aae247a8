"""The adapters under which every contract is tested."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.sharded import make_mesh

ADAPTERS = ["ddp", "optimizer"]


def make(
    adapter: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: Any,
    *,
    bucket_kb: float = 20.0,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer, tw.Handle]:
    """(module to call, optimizer to step, handle)."""
    if adapter == "ddp":
        ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_kb / 1024)
        return ddp, optimizer, tw.attach(ddp, method, **options)
    if adapter == "fsdp":
        # Half as many replicas, in two shards each. Sharding makes new parameters, which need their optimizer anew.
        fully_shard(model, mesh=make_mesh(dist.get_world_size() // 2, 2))
        optimizer = type(optimizer)(model.parameters(), **optimizer.defaults)
        return model, optimizer, tw.attach(model, method, **options)
    assert adapter == "optimizer"
    wrapped = tw.DistributedOptimizer(
        optimizer, model=model, method=method, bucket_mb=bucket_kb / 1024, **options
    )
    return model, wrapped, wrapped.handle
