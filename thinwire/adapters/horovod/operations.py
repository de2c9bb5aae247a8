"""Horovod's collectives: blocking ones, which autograd can differentiate, and asynchronous, in-place and grouped ones.

Horovod negotiates the order of operations by name. Here there is no negotiation: all ranks must call in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.adapters.horovod.adasum import adasum
from thinwire.adapters.horovod.environment import rank, size
from thinwire.adapters.horovod.reductions import (
    TORCH_OPS,
    Adasum,
    Average,
    Compression,
    ReduceOp,
    Sum,
    check_compression,
    check_op,
)
from thinwire.engine.failures import failing_as
from thinwire.errors import UsageError
from thinwire.methods.base import Method


class Operation:
    """An asynchronous collective under way: what Horovod calls a handle."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any]) -> None:
        self._works = works
        """Pieces of torch's work, or other operations."""
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    @torch.no_grad()
    def wait(self) -> Any:
        with failing_as(None, "tensors"):
            for work in self._works:
                work.wait()
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result


def poll(handle: Operation) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.is_completed()


def synchronize(handle: Operation) -> Any:
    """Wait for an asynchronous collective; its result."""
    return handle.wait()


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        run: Callable[[Tensor], Tensor],
        back: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.back = back
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.back(gradients[0]), None, None


def _differentiable(
    tensor: Tensor, run: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> Tensor:
    """run(tensor), whose gradient `back` takes to the tensor's."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        result: Tensor = _Differentiable.apply(tensor, run, back)
        return result
    return run(tensor)


# -- all-reduce -------------------------------------------------------------------------------------------------------


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Method = Compression.none,
) -> Operation:
    """Start to overwrite every tensor with its mean over ranks, or what else `op` says."""
    chosen = check_op(op, average)
    narrow = check_compression(compression)
    scaled = [
        t.detach() if prescale_factor == 1.0 else t.detach() * prescale_factor for t in tensors
    ]
    sent = [t.to(narrow or t.dtype, copy=True).contiguous() for t in scaled]
    works: list[Any] = []
    if chosen is Adasum:
        with failing_as(None, "tensors"):
            adasum(sent)
    else:
        works = [dist.all_reduce(t, op=TORCH_OPS[chosen], async_op=True) for t in sent]
    factor = postscale_factor / (size() if chosen is Average else 1)

    def finish() -> list[Tensor]:
        for tensor, result in zip(tensors, sent, strict=True):
            tensor.detach().copy_(result if factor == 1.0 else result.to(tensor.dtype) * factor)
        return list(tensors)

    return Operation(works, finish)


def grouped_allreduce_async(tensors: Sequence[Tensor], *args: Any, **options: Any) -> Operation:
    return grouped_allreduce_async_([_copy(t) for t in tensors], *args, **options)


def grouped_allreduce_(tensors: Sequence[Tensor], *args: Any, **options: Any) -> list[Tensor]:
    return synchronize(grouped_allreduce_async_(tensors, *args, **options))


def grouped_allreduce(tensors: Sequence[Tensor], *args: Any, **options: Any) -> list[Tensor]:
    return [allreduce(tensor, *args, **options) for tensor in tensors]


def allreduce_async_(tensor: Tensor, *args: Any, **options: Any) -> Operation:
    """Like `grouped_allreduce_async_`, for one tensor."""
    group = grouped_allreduce_async_([tensor], *args, **options)
    return Operation([group], lambda: group.wait()[0])


def allreduce_async(tensor: Tensor, *args: Any, **options: Any) -> Operation:
    return allreduce_async_(_copy(tensor), *args, **options)


def allreduce_(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    return synchronize(allreduce_async_(tensor, *args, **options))


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Method = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """The mean over ranks, or what else `op` says, in a new tensor."""
    settings = {
        "average": average,
        "op": op,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "compression": compression,
    }

    def run(values: Tensor) -> Tensor:
        return synchronize(allreduce_async(values, **settings))

    # As in Horovod, the gradient travels as the tensor did.
    return _differentiable(tensor, run, run)


# -- gather, broadcast, all-to-all, reduce-scatter --------------------------------------------------------------------


def allgather_async(tensor: Tensor, name: str | None = None) -> Operation:
    """Start to concatenate all ranks' tensors on dimension 0, in which they may differ. Their sizes are exchanged at once."""
    values = tensor.detach().contiguous()
    counts = _gather_counts([len(values)], values.device)
    longest = max(1, *(count for (count,) in counts))
    padded = values.new_zeros((longest, *values.shape[1:]))
    padded[: len(values)] = values
    pieces = [torch.empty_like(padded) for _ in range(size())]
    work = dist.all_gather(pieces, padded, async_op=True)
    return Operation(
        [work], lambda: torch.cat([p[:n] for p, (n,) in zip(pieces, counts, strict=True)])
    )


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """All ranks' tensors concatenated on dimension 0, which may differ between ranks."""

    def back(gradient: Tensor) -> Tensor:
        counts = [count for (count,) in _gather_counts([len(tensor)], tensor.device)]
        total = allreduce(gradient, op=Sum)
        return total[sum(counts[: rank()]) : sum(counts[: rank() + 1])]

    return _differentiable(tensor, lambda values: synchronize(allgather_async(values)), back)


def grouped_allgather_async(tensors: Sequence[Tensor], name: str | None = None) -> Operation:
    started = [allgather_async(tensor) for tensor in tensors]
    return Operation(started, lambda: [one.wait() for one in started])


def grouped_allgather(tensors: Sequence[Tensor], name: str | None = None) -> list[Tensor]:
    return [allgather(tensor) for tensor in tensors]


def broadcast_async_(tensor: Tensor, root_rank: int, name: str | None = None) -> Operation:
    """Start to overwrite the tensor with one rank's."""
    values = tensor.detach().contiguous()
    work = dist.broadcast(values, src=root_rank, async_op=True)

    def finish() -> Tensor:
        tensor.detach().copy_(values)
        return tensor

    return Operation([work], finish)


def broadcast_async(tensor: Tensor, root_rank: int, name: str | None = None) -> Operation:
    return broadcast_async_(_copy(tensor), root_rank)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    return synchronize(broadcast_async_(tensor, root_rank))


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """One rank's tensor, in a new one."""

    def back(gradient: Tensor) -> Tensor:
        total = allreduce(gradient, op=Sum)
        return total if rank() == root_rank else torch.zeros_like(total)

    def run(values: Tensor) -> Tensor:
        return synchronize(broadcast_async(values, root_rank))

    return _differentiable(tensor, run, back)


def alltoall_async(
    tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None
) -> Operation:
    """Start to send splits[p] rows to each rank p, equal shares unless given. The splits are exchanged at once.

    The result is what arrived, by source; with `splits` a pair, whose second is how many rows each rank sent.
    """
    rows = _check_splits(tensor, splits)
    received = [counts[rank()] for counts in _gather_counts(rows, tensor.device)]
    values = tensor.detach().contiguous()
    arrived = values.new_empty((sum(received), *values.shape[1:]))
    work = dist.all_to_all_single(arrived, values, received, rows, async_op=True)
    if splits is None:
        return Operation([work], lambda: arrived)
    return Operation([work], lambda: (arrived, torch.tensor(received, dtype=torch.int32)))


def alltoall(
    tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None
) -> Any:
    """Send splits[p] rows to each rank p; see `alltoall_async`."""
    sources: list[int] = []

    def run(values: Tensor) -> Tensor:
        arrived, counts = synchronize(alltoall_async(values, _check_splits(values, splits)))
        sources.extend(counts.tolist())
        return arrived

    arrived = _differentiable(tensor, run, lambda gradient: alltoall(gradient, sources)[0])
    return arrived if splits is None else (arrived, torch.tensor(sources, dtype=torch.int32))


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Method = Compression.none,
) -> Operation:
    """Start to reduce over ranks and keep this rank's rows; where they do not divide, the first ranks have one more."""
    chosen = check_op(op, None)
    if chosen is Adasum:
        raise UsageError("op is hvd.Adasum; reducescatter takes the other operations")
    narrow = check_compression(compression)
    share, more = divmod(len(tensor), size())
    counts = [share + (r < more) for r in range(size())]
    values = tensor.detach() if prescale_factor == 1.0 else tensor.detach() * prescale_factor
    values = values.to(narrow or values.dtype)
    padded = values.new_zeros((size(), max(1, counts[0]), *values.shape[1:]))
    for piece, rows in zip(padded, values.split(counts), strict=True):
        piece[: len(rows)] = rows
    result = torch.empty_like(padded[0])
    work = _reduce_scatter(result, padded.flatten(0, 1), op=TORCH_OPS[chosen], async_op=True)
    factor = postscale_factor / (size() if chosen is Average else 1)

    def finish() -> Tensor:
        own = result[: counts[rank()]].to(tensor.dtype)
        return own if factor == 1.0 else (own * factor).to(tensor.dtype)

    return Operation([work], finish)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Method = Compression.none,
    op: ReduceOp = Average,
    **options: Any,
) -> Tensor:
    """This rank's rows of what is reduced over ranks; see `reducescatter_async`."""

    def run(values: Tensor) -> Tensor:
        return synchronize(reducescatter_async(values, op=op, compression=compression, **options))

    def back(gradient: Tensor) -> Tensor:
        gathered = allgather(gradient)
        return gathered / size() if op is Average else gathered

    return _differentiable(tensor, run, back)


def grouped_reducescatter_async(tensors: Sequence[Tensor], *args: Any, **options: Any) -> Operation:
    started = [reducescatter_async(tensor, *args, **options) for tensor in tensors]
    return Operation(started, lambda: [one.wait() for one in started])


def grouped_reducescatter(tensors: Sequence[Tensor], *args: Any, **options: Any) -> list[Tensor]:
    return [reducescatter(tensor, *args, **options) for tensor in tensors]


def barrier() -> None:
    with failing_as(None, "a barrier"):
        dist.barrier()


# -- what is asked for ------------------------------------------------------------------------------------------------

# torch 2.13 renames it and warns about the old name.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _check_splits(tensor: Tensor, splits: Tensor | Sequence[int] | None) -> list[int]:
    if splits is None:
        if len(tensor) % size():
            raise UsageError(
                f"tensor has {len(tensor)} rows; without splits they must divide by the {size()} ranks"
            )
        return [len(tensor) // size()] * size()
    rows = splits.tolist() if isinstance(splits, Tensor) else list(splits)
    if len(rows) != size() or sum(rows) != len(tensor) or min(rows) < 0:
        raise UsageError(
            f"splits is {rows}; it must be {size()} numbers that add up to the tensor's {len(tensor)} rows"
        )
    return rows


def _gather_counts(counts: Sequence[int], device: torch.device) -> list[list[int]]:
    """A few numbers of every rank."""
    mine = torch.tensor(counts, device=device)
    everybodys = [torch.empty_like(mine) for _ in range(size())]
    with failing_as(None, "sizes"):
        dist.all_gather(everybodys, mine)
    return [one.tolist() for one in everybodys]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
