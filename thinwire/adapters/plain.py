"""What is left of an exchange when its handle is closed: the plain mean."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future


def plain_mean(flat: Tensor, group: dist.ProcessGroup) -> Future[Tensor]:
    """Average a bucket over the ranks of a group, in place."""
    flat.div_(dist.get_world_size(group))
    work = dist.all_reduce(flat, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda _: flat)
