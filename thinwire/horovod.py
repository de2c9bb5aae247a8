"""A Horovod face: `import thinwire.horovod as hvd` in a script written for Horovod's PyTorch API.

No MPI: ranks come from the environment that torchrun, SLURM launchers and `thinwire lab` set. `compression=` takes
`Compression.none`, `Compression.fp16`, `Compression.bf16` or any thinwire method.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.exchange.network import broadcast_into
from thinwire.methods.base import Method

Average = "Average"
Sum = "Sum"


class Compression:
    """Horovod's names for its own codes, as thinwire methods."""

    none: Method = tw.Dense()
    fp16: Method = tw.Dense(dtype=torch.float16)
    bf16: Method = tw.Dense(dtype=torch.bfloat16)


def init() -> None:
    """Join the group that the launcher's environment describes; alone if there is none."""
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        store = dist.HashStore()
        dist.init_process_group(_backend(), store=store, rank=0, world_size=1)
        return
    if _backend() == "nccl":
        torch.cuda.set_device(local_rank())
    dist.init_process_group(_backend())


def shutdown() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def is_initialized() -> bool:
    return dist.is_initialized()


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", rank() if is_initialized() else 0))


def local_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", size() if is_initialized() else 1))


def nccl_built() -> bool:
    return dist.is_nccl_available()


def _backend() -> str:
    # Horovod scripts pin one GPU per local process; with fewer GPUs than processes NCCL would refuse.
    return (
        "nccl"
        if torch.cuda.is_available() and torch.cuda.device_count() >= local_size()
        else "gloo"
    )


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: Method = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    *,
    model: nn.Module | None = None,
    rank: int | None = None,
    threshold: float | None = None,
) -> tw.DistributedOptimizer:
    """Horovod's constructor. `rank` and `threshold` are those of ACP-SGD's: factor rank, fusion size in MB."""
    if op not in (Average, Sum):
        raise UsageError(f"op is {op!r}; it must be hvd.Average or hvd.Sum")
    if not isinstance(compression, Method):
        raise UsageError(
            f"compression is {compression!r}; it must be hvd.Compression.none, .fp16, .bf16 or a thinwire method"
        )
    method = tw.ACPSGD(rank=rank) if rank is not None else compression
    return tw.DistributedOptimizer(
        optimizer,
        model=model,
        named_parameters=named_parameters,
        method=method,
        bucket_mb=25 if threshold is None else threshold,
        backward_passes_per_step=backward_passes_per_step,
        average=op == Average,
    )


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
    box = [obj]
    dist.broadcast_object_list(box, src=root_rank)
    return box[0]


@torch.no_grad()
def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: str | None = None
) -> Tensor:
    """The mean (or with op=hvd.Sum the sum) over ranks, in a new tensor."""
    if op not in (None, Average, Sum):
        raise UsageError(f"op is {op!r}; it must be hvd.Average or hvd.Sum")
    result = tensor.detach().clone()
    dist.all_reduce(result)
    summing = op == Sum or (op is None and average is False)
    return result if summing else (result / size()).to(tensor.dtype)


@torch.no_grad()
def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """All ranks' tensors concatenated on dimension 0, which may differ between ranks."""
    rows = torch.tensor([tensor.shape[0]], device=tensor.device)
    counts = [torch.zeros_like(rows) for _ in range(size())]
    dist.all_gather(counts, rows)
    longest = max(1, *(int(count) for count in counts))
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    pieces = [torch.empty_like(padded) for _ in range(size())]
    dist.all_gather(pieces, padded)
    return torch.cat([piece[: int(n)] for piece, n in zip(pieces, counts, strict=True)])


def barrier() -> None:
    dist.barrier()
