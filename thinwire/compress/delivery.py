"""BucketDelivery: what writes the few entries of an update into the bucket, for exchanges that are torch code on entries."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from thinwire.compress.base import Terms
from thinwire.exchange.base import Delivery
from thinwire.kernels.cuda.entries import DeliveryKernels
from thinwire.layout import Group


class BucketDelivery:
    """The kernels of one group. Narrower gradients need the exact update, to keep what rounding loses: nothing is written then."""

    def __init__(self, group: Group, terms: Terms) -> None:
        self._group, self._world = group, terms.place.world
        fits = group.numel < 1 << 31
        self.possible = terms.gradient_dtype == torch.float32 and self._world > 1 and fits

    @cached_property
    def kernels(self) -> DeliveryKernels:
        return DeliveryKernels(self._group, self._world)

    def into(self, bucket_flat: Tensor) -> Delivery | None:
        """For one step of the bucket."""
        if not self.possible:
            return None

        def deliver(positions: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
            return bucket_flat, self.kernels.write(bucket_flat, positions, sums)

        return deliver
