"""NamedBuckets: gradients that come as tensors by name, each set of names in a bucket of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.layout import Bucket, ParameterInfo, lay_out


class NamedBuckets:
    def __init__(self, parameters: Mapping[str, ParameterInfo], device: torch.device) -> None:
        self._parameters = parameters
        self._device = device
        self._buckets: dict[tuple[str, ...], Bucket] = {}

    @torch.no_grad()
    def fill(self, gradients: Mapping[str, Tensor]) -> Bucket:
        """The bucket of these names, with these gradients in it."""
        key = tuple(gradients)
        bucket = self._buckets.get(key)
        if bucket is None:
            first = gradients[key[0]]
            infos = [self._parameters[name] for name in key]
            layout = lay_out(infos, first.dtype, self._device)
            flat = torch.zeros(layout.numel, dtype=first.dtype, device=self._device)
            bucket = self._buckets[key] = Bucket(layout, flat)
        torch._foreach_copy_(views_of(bucket), list(gradients.values()))
        return bucket


def views_of(bucket: Bucket) -> list[Tensor]:
    return [slot.view(bucket.flat) for slot in bucket.layout.slots]
