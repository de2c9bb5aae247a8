"""What adapters refuse before any gradient flows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from thinwire.errors import UsageError
from thinwire.validate import check_finite_number

logger = logging.getLogger(__name__)


def check_parameters(module: nn.Module | None, parameters: dict[str, nn.Parameter]) -> None:
    """Refuse at attach what a hook could not handle later."""
    if not parameters:
        raise UsageError(
            "the model has no parameter that requires a gradient; there is nothing to compress"
        )
    for name, parameter in parameters.items():
        if not parameter.dtype.is_floating_point:
            raise UsageError(
                f"parameter {name!r} has dtype {parameter.dtype}; only float16, bfloat16, float32 and float64 gradients can be sent"
            )
    for name, child in module.named_modules() if module is not None else ():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise UsageError(
                f"module {name!r} has sparse=True, which gives sparse-layout gradients; only dense ones can be sent, set sparse=False"
            )


def has_own_collectives(module: nn.Module | None) -> bool:
    """Whether layers ask for collectives while backward runs. Torch, Horovod and apex have a layer of that name."""
    return module is not None and any(
        type(child).__name__ == "SyncBatchNorm" for child in module.modules()
    )


def check_optimizer(optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse what is no optimizer; warn of one that steps nothing of this model."""
    if optimizer is None:
        return
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        shown = repr(optimizer) if isinstance(optimizer, str) else f"a {type(optimizer).__name__}"
        raise UsageError(
            f"optimizer is {shown}; it must be the torch.optim.Optimizer that steps the model"
        )
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    if not any(id(parameter) in stepped for parameter in parameters.values()):
        logger.warning(
            "the %s in optimizer= has none of the model's parameters; what is safe depends on the one that steps the model",
            type(optimizer).__name__,
        )


def check_bucket_mb(bucket_mb: Any) -> None:
    check_finite_number("bucket_mb", bucket_mb)
    if bucket_mb < 0:
        raise UsageError(
            f"bucket_mb is {bucket_mb!r}; it must be a number of megabytes, 0 for a bucket per parameter"
        )


def find_group(asked: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = asked or dist.group.WORLD
    if group is None:
        raise UsageError(
            "there is no process group; call torch.distributed.init_process_group first"
        )
    return group
