"""Horovod's DistributedOptimizer, and joining for ranks that run out of data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import thinwire as tw
from thinwire.adapters.horovod.adasum import AdasumOptimizer
from thinwire.adapters.horovod.environment import rank as own_rank
from thinwire.adapters.horovod.environment import size
from thinwire.adapters.horovod.reductions import (
    Adasum,
    Average,
    Compression,
    ReduceOp,
    Sum,
    check_compression,
)
from thinwire.adapters.wrapped import WrappedOptimizer
from thinwire.errors import UsageError
from thinwire.methods.base import Method
from thinwire.validate import check_positive_number

_alive: WeakSet[tw.DistributedOptimizer] = WeakSet()
_joins = 0


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: Method = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    *,
    model: nn.Module | None = None,
    rank: int | None = None,
    threshold: float | None = None,
) -> WrappedOptimizer:
    """Horovod's constructor. `rank` and `threshold` are those of ACP-SGD's: factor rank, fusion size in MB.

    `gradient_predivide_factor`, `num_groups` and `groups` change nothing: gradients are divided before they are summed,
    and fused in the order in which backward makes them.
    """
    if op not in (Average, Sum, Adasum):
        raise UsageError(f"op is {op!r}; it must be hvd.Average, hvd.Sum or hvd.Adasum")
    check_positive_number("gradient_predivide_factor", gradient_predivide_factor)
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise UsageError(
            f"gradient_predivide_factor is {gradient_predivide_factor!r}; with op={op!r} it must be 1.0"
        )
    if sparse_as_dense:
        raise UsageError(
            "sparse_as_dense is True; sparse-layout gradients cannot be sent, make the embedding with sparse=False"
        )
    if not isinstance(compression, Method):
        raise UsageError(
            f"compression is {compression!r}; it must be hvd.Compression.none, .fp16, .bf16 or a thinwire method"
        )
    if op is Adasum:
        return AdasumOptimizer(optimizer, check_compression(compression))
    wrapped = tw.DistributedOptimizer(
        optimizer,
        model=model,
        named_parameters=named_parameters,
        method=tw.ACPSGD(rank=rank) if rank is not None else compression,
        bucket_mb=25 if threshold is None else threshold,
        backward_passes_per_step=backward_passes_per_step,
        average=op is Average,
    )
    _alive.add(wrapped)
    return wrapped


def join(device: int = -1) -> int:
    """Wait for all ranks; meanwhile take part in their gradient exchanges with zeros. The rank that joined last.

    As in Horovod, this rank's parameters stay as they are, so give it those of the last one:
    `hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.join())`. Other collectives than those of a
    `DistributedOptimizer`, of which there may be one, cannot be joined.

    1. Ranks count themselves in the store; the last one writes down how many exchanges it has made.
    2. Everyone exchanges up to one more than that. A rank that came earlier may already wait in that one, where nobody has
       a gradient: it is taken back.
    """
    global _joins
    _joins += 1
    optimizers = [one for one in _alive if not one.handle.closed]
    if len(optimizers) > 1:
        raise UsageError(
            f"hvd.join() was called with {len(optimizers)} DistributedOptimizers; it can follow the exchanges of one"
        )
    store = dist.PrefixStore(f"thinwire/join{_joins}", dist.distributed_c10d._get_default_store())
    done = optimizers[0].handle.reducer.step if optimizers else 0
    if store.add("joined", 1) == size():
        store.set("last", f"{own_rank()} {done}")
    if not optimizers:
        store.wait(["last"])
        return int(store.get("last").split()[0])
    while not (store.check(["last"]) and int(store.get("last").split()[1]) < done):
        optimizers[0].contribute_nothing()
        done += 1
    optimizers[0].handle.reducer.settle(discard=True)
    return int(store.get("last").split()[0])
