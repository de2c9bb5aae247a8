"""Whole objects, parameters and optimizer states from one rank to all."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from thinwire.engine.agreement import broadcast_bytes, gather_bytes
from thinwire.engine.failures import failing_as
from thinwire.engine.network import broadcast_into


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0
) -> None:
    """Copy every tensor of a state_dict or of named parameters from one rank to all."""
    pairs = params.items() if isinstance(params, Mapping) else params
    for _, tensor in sorted(pairs, key=lambda pair: pair[0]):
        if isinstance(tensor, Tensor):
            broadcast_into(tensor, root_rank)


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0) -> None:
    """Give every rank one rank's optimizer state, whatever its structure."""
    state = broadcast_object(optimizer.state_dict(), root_rank)
    optimizer.load_state_dict(state)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """One rank's object. It is pickled: all ranks must trust each other, as in Horovod."""
    mine = pickle.dumps(obj) if dist.get_rank() == root_rank else b""
    with failing_as(_world(), "objects"):
        sent = broadcast_bytes(_world(), mine, root_rank)
    return pickle.loads(sent)


def broadcast_object_fn(root_rank: int = 0, name: str | None = None) -> Callable[[Any], Any]:
    return lambda obj: broadcast_object(obj, root_rank)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, in rank order."""
    with failing_as(_world(), "objects"):
        everybodys = gather_bytes(_world(), pickle.dumps(obj))
    return [pickle.loads(one) for one in everybodys]


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD
