"""Adasum: gradients that agree are averaged, gradients that have nothing in common are added.

Maleki et al., "Scaling Distributed Training with Adaptive Summation" (MLSys 2021). Of two vectors

    adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

and of more than two that of both halves' Adasums, tensor by tensor. As in Horovod, tensors on GPUs are averaged inside each
machine first, and combined between machines only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.adapters.horovod.environment import is_homogeneous, local_size
from thinwire.adapters.wrapped import WrappedOptimizer
from thinwire.engine.groups import host_groups
from thinwire.errors import UsageError
from thinwire.exchange.requests import BETWEEN, INSIDE


def combine(a: Tensor, b: Tensor) -> Tensor:
    """Adasum of two tensors. Where one is zero, the other."""
    a64, b64 = a.double(), b.double()
    dot, of_a, of_b = (a64 * b64).sum(), a64.square().sum(), b64.square().sum()
    share_a = 1 - torch.where(of_a > 0, dot / (2 * of_a), 0.0)
    share_b = 1 - torch.where(of_b > 0, dot / (2 * of_b), 0.0)
    return (share_a * a64 + share_b * b64).to(a.dtype)


@torch.no_grad()
def adasum(tensors: Sequence[Tensor]) -> None:
    """Overwrite contiguous tensors, the same on all ranks in dtype and shape, with their Adasum over ranks."""
    world = dist.group.WORLD
    assert world is not None
    group = world
    if tensors and tensors[0].is_cuda and local_size() > 1 and is_homogeneous():
        groups = _machines(world, local_size())
        for tensor in tensors:
            dist.all_reduce(tensor.div_(local_size()), group=groups[INSIDE])
        group = groups[BETWEEN]
    ranks = dist.get_world_size(group)
    if ranks & (ranks - 1):
        raise UsageError(
            f"op is hvd.Adasum among {ranks} ranks; it combines pairs, so their number must be a power of 2"
        )
    distance = 1
    while distance < ranks:
        _combine_with(dist.get_rank(group) ^ distance, tensors, group)
        distance *= 2


def _combine_with(partner: int, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Both partners put the lower rank's tensor first, so that both end with the same bits."""
    received = [torch.empty_like(tensor) for tensor in tensors]
    operations = []
    for tensor, other in zip(tensors, received, strict=True):
        operations.append(dist.P2POp(dist.isend, tensor, group=group, group_peer=partner))
        operations.append(dist.P2POp(dist.irecv, other, group=group, group_peer=partner))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    first = dist.get_rank(group) < partner
    for tensor, other in zip(tensors, received, strict=True):
        tensor.copy_(combine(tensor, other) if first else combine(other, tensor))


_made: dict[tuple[dist.ProcessGroup, int], dict[str, dist.ProcessGroup]] = {}


def _machines(world: dist.ProcessGroup, per_host: int) -> dict[str, dist.ProcessGroup]:
    if (world, per_host) not in _made:
        _made[world, per_host] = host_groups(world, per_host)
    return _made[world, per_host]


class AdasumOptimizer(WrappedOptimizer):
    """Every rank steps by its own gradient, and what the steps changed is combined by Adasum. The exchange is in `step`."""

    def __init__(self, optimizer: torch.optim.Optimizer, dtype: torch.dtype | None) -> None:
        super().__init__(optimizer)
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        before = [p.detach().clone() for p in held]
        loss = self.step_wrapped(closure)
        # Everyone sends all of them: a parameter without a gradient here may have one elsewhere.
        changes = [
            (p - old).to(self._dtype or p.dtype).contiguous()
            for p, old in zip(held, before, strict=True)
        ]
        adasum(changes)
        for parameter, old, change in zip(held, before, changes, strict=True):
            parameter.copy_(old + change.to(old.dtype))
        return loss

    def synchronize(self) -> None:
        """The exchange is in `step`."""
