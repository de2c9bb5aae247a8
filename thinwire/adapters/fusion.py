"""Fusion buffers: flat gradient buckets for parameters that no DDP has bucketed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from thinwire.layout import Bucket, ParameterInfo, lay_out


@dataclass(eq=False)
class FusionBuffer:
    """One bucket and the parameters still missing from it in this backward."""

    bucket: Bucket
    parameters: list[nn.Parameter]
    missing: set[int] = field(default_factory=set)

    def reset(self) -> None:
        self.missing = set(range(len(self.parameters)))

    def fill(self, index: int) -> None:
        """Copy one parameter's gradient in; zeros if it has none."""
        view = self.bucket.layout.slots[index].view(self.bucket.flat)
        gradient = self.parameters[index].grad
        if gradient is None:
            view.zero_()
        else:
            view.copy_(gradient)
        self.missing.discard(index)


def fuse(
    described: Sequence[tuple[nn.Parameter, ParameterInfo]], bucket_bytes: int
) -> list[FusionBuffer]:
    """Buckets in reverse registration order, which is about the order in which backward makes gradients.

    A bucket holds one dtype on one device and closes before it would exceed `bucket_bytes`; 0 gives every parameter a
    bucket of its own.
    """
    buffers: list[FusionBuffer] = []
    run: list[tuple[nn.Parameter, ParameterInfo]] = []
    for parameter, info in reversed(described):
        if run and not _fits(run, parameter, bucket_bytes):
            buffers.append(_buffer(run))
            run = []
        run.append((parameter, info))
    if run:
        buffers.append(_buffer(run))
    return buffers


def _fits(
    run: Sequence[tuple[nn.Parameter, ParameterInfo]], parameter: nn.Parameter, bucket_bytes: int
) -> bool:
    first = run[0][0]
    same_kind = (first.dtype, first.device) == (parameter.dtype, parameter.device)
    return same_kind and sum(p.nbytes for p, _ in run) + parameter.nbytes <= bucket_bytes


def _buffer(run: Sequence[tuple[nn.Parameter, ParameterInfo]]) -> FusionBuffer:
    first = run[0][0]
    layout = lay_out((info for _, info in run), first.dtype, first.device)
    flat = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
    return FusionBuffer(Bucket(layout, flat), [parameter for parameter, _ in run])
