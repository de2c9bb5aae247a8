"""How Horovod's scripts say what a collective does: the operation, and the code on the wire."""

from __future__ import annotations

import enum
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import UsageError
from thinwire.methods.base import Dense, Method


class ReduceOp(enum.Enum):
    """How the tensors of all ranks become one."""

    Average = "Average"
    Sum = "Sum"
    Adasum = "Adasum"
    Min = "Min"
    Max = "Max"
    Product = "Product"

    def __repr__(self) -> str:
        return f"hvd.{self.name}"


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product

TORCH_OPS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


class Compression:
    """Horovod's names for its own codes, as thinwire methods."""

    none: Method = Dense()
    fp16: Method = Dense(dtype=torch.float16)
    bf16: Method = Dense(dtype=torch.bfloat16)


def check_op(op: Any, average: bool | None) -> ReduceOp:
    """The operation, Average unless said; `average` is how old scripts say it."""
    if op is not None and average is not None:
        raise UsageError(f"op is {op!r} and average is {average!r}; give one of them")
    if op is None:
        return Sum if average is False else Average
    if not isinstance(op, ReduceOp):
        raise UsageError(f"op is {op!r}; it must be one of {', '.join(map(repr, ReduceOp))}")
    return op


def check_compression(compression: Any) -> torch.dtype | None:
    """The dtype on the wire, None = the tensor's own."""
    if not isinstance(compression, Dense):
        raise UsageError(
            f"compression is {compression!r}; a single collective takes hvd.Compression.none, .fp16 or .bf16"
        )
    return compression.dtype
