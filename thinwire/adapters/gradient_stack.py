"""The gradients of all simulated workers, stacked: one bucket of every worker, a row each."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn

from thinwire.adapters.fusion import FusionBuffer
from thinwire.layout import Bucket

ROW_ALIGNMENT = 64
"""Elements."""


class GradientStack:
    """One bucket of every worker, a row each. Workers fill their rows, the exchange leaves the update in all of them."""

    def __init__(self, buffer: FusionBuffer, workers: int) -> None:
        flat = buffer.bucket.flat
        layout = buffer.bucket.layout
        self.parameters: list[nn.Parameter] = buffer.parameters
        # Kernels load 16 bytes at a time, from the beginning of a row as from that of a buffer.
        width = -(-flat.numel() // ROW_ALIGNMENT) * ROW_ALIGNMENT
        self.rows = flat.new_zeros(workers, width)[:, : flat.numel()]
        self.buckets = [Bucket(layout, row) for row in self.rows]
        self._views = [[slot.view(row) for slot in layout.slots] for row in self.rows]
        self._filled: list[set[int]] = [set() for _ in range(workers)]
        """By worker: index parameters it has had a gradient for in this step."""

    def lend(self, rank: int) -> None:
        """`p.grad` becomes what the worker has so far, for backward to add to; None where it has nothing."""
        views = self._views[rank]
        for index, parameter in enumerate(self.parameters):
            parameter.grad = views[index] if index in self._filled[rank] else None

    def collect(self, rank: int) -> None:
        """Take the worker's gradients off the model and into its row."""
        views, filled = self._views[rank], self._filled[rank]
        copied: list[int] = []
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                if index not in filled:
                    views[index].zero_()
            elif parameter.grad is not views[index]:
                copied.append(index)
        if copied:
            gradients = [cast(Tensor, self.parameters[index].grad) for index in copied]
            torch._foreach_copy_([views[index] for index in copied], gradients)
        filled.update(copied)
        self.drop()

    def put(self, gradients: Mapping[str, Tensor]) -> None:
        """Every worker's gradients at once, in place of what it had: by name, [workers, *shape]."""
        layout = self.buckets[0].layout
        given = [gradients[slot.name].unbind(0) for slot in layout.slots]
        # All at once: an operation for each worker costs the host more than the copies cost a GPU.
        torch._foreach_copy_(list(chain(*self._views)), list(chain(*zip(*given, strict=True))))
        for filled in self._filled:
            filled.update(range(len(given)))

    def drop(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def deliver(self) -> None:
        """`p.grad` becomes the update; None where no worker had a gradient, as under DDP."""
        used = set().union(*self._filled)
        for index, parameter in enumerate(self.parameters):
            parameter.grad = self._views[0][index] if index in used else None
        for filled in self._filled:
            filled.clear()
