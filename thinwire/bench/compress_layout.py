"""What is compressed: a model's parameters, and the buckets in which DDP hands over their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from thinwire.bench.models import find_model
from thinwire.layout import BucketLayout, ParameterInfo, Slot, describe_module

# What DDP takes when nobody asks: a small first bucket, so that something can be sent early.
DDP_FIRST_BYTES = 1 << 20
DDP_BUCKET_BYTES = 25 << 20


def describe_model(name: str) -> list[ParameterInfo]:
    """The parameters of a model of `bench step`, in registration order; built without memory for them."""
    spec = find_model(name)
    device = torch.device("meta")
    with device:
        model = spec.build(device, spec.batch, spec.length).model
    return [info for _, info in describe_module(model).values()]


def keep_compressible(infos: Sequence[ParameterInfo]) -> list[ParameterInfo]:
    """Those of two dimensions or more: biases and norms travel densely under every method."""
    return [info for info in infos if len(info.shape) > 1 and info.numel]


def distinct_shapes(infos: Sequence[ParameterInfo]) -> list[ParameterInfo]:
    """One parameter of every shape, the smallest first."""
    found = {info.shape: info for info in reversed(infos)}
    return sorted(found.values(), key=lambda info: (info.numel, info.shape))


def lay_out_buckets(
    infos: Sequence[ParameterInfo], device: torch.device, bucket_mb: float | None
) -> list[BucketLayout]:
    """Buckets as DDP makes them once it has seen in which order gradients come: last parameter first.

    `bucket_mb` is DDP's `bucket_cap_mb`, None its own sizes; a number above the model's size gives one bucket.
    """
    order = list(reversed(infos))
    tensors = [torch.empty(info.shape, dtype=info.dtype, device="meta") for info in order]
    limits = [DDP_FIRST_BYTES, DDP_BUCKET_BYTES]
    if bucket_mb is not None:
        limits = [max(1, int(bucket_mb * 2**20))]
    assigned, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    return [_layout([order[index] for index in members], device) for members in assigned]


def _layout(infos: Sequence[ParameterInfo], device: torch.device) -> BucketLayout:
    slots: list[Slot] = []
    offset = 0
    for info in infos:
        slots.append(info.slot(offset))
        offset += info.numel
    return BucketLayout(tuple(slots), offset, infos[0].dtype, device)
