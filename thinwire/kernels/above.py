"""Entries at or above a threshold, at most `capacity` of them, never none, in ascending index order."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.topk import row_topk, row_topk_reference


def select_above_reference(row: Tensor, threshold: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """(indices [capacity], count): the |x| >= threshold, cut to the largest `capacity`, at least the largest one.

    Places beyond `count` hold index 0.
    """
    return _cut(row, row_topk_reference(row, capacity), threshold)


def select_above(row: Tensor, threshold: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Equal to the reference. On the CPU one compare and a compaction; elsewhere without a host wait."""
    if row.device.type != "cpu":
        return _cut(row, row_topk(row, capacity), threshold)
    survivors = (row.abs() >= threshold).nonzero()[:, 0]
    if survivors.numel() > capacity:
        survivors = survivors[row_topk(row[survivors], capacity)]
    elif not survivors.numel():
        survivors = row_topk(row, 1)
    indices = torch.zeros(capacity, dtype=torch.int64)
    indices[: survivors.numel()] = survivors
    return indices, torch.tensor(survivors.numel(), dtype=torch.int32)


def _cut(row: Tensor, largest: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Keep those of the `largest` (ascending indices) that reach the threshold, packed to the front."""
    magnitudes = row[largest].abs()
    passed = (magnitudes >= threshold).index_fill(0, row_topk(magnitudes, 1), True)
    order = passed.logical_not().to(torch.uint8).sort(stable=True).indices
    count = passed.sum(dtype=torch.int32)
    places = torch.arange(largest.numel(), device=row.device)
    return torch.where(places < count, largest[order], 0), count
