"""Top-k of each row by magnitude, ties to the lowest index, result in ascending index order.

`row_topk_reference` reads like the definition; `row_topk` is the same function without a full sort.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_topk_reference(matrix: Tensor, keep: int) -> Tensor:
    """Indices [..., keep] of the `keep` largest |x| on the last dimension."""
    order = matrix.abs().sort(dim=-1, descending=True, stable=True).indices
    return order[..., :keep].sort(dim=-1).values


def row_topk(matrix: Tensor, keep: int) -> Tensor:
    """Equal to the reference for every finite input of 32 bits or less.

    Magnitude bits and the mirrored index form one 64-bit key per element, all different, so that plain top-k
    has no ties to break and the answer is the same on every device.
    """
    if matrix.dtype == torch.float64:
        return row_topk_reference(matrix, keep)
    length = matrix.shape[-1]
    if keep == length:
        return torch.arange(length, device=matrix.device).expand(matrix.shape)
    magnitude = matrix.abs().float().view(torch.int32).long()
    mirrored = torch.arange(length - 1, -1, -1, device=matrix.device)
    keys = magnitude.bitwise_left_shift_(32).bitwise_or_(mirrored)
    top = keys.topk(keep, dim=-1, sorted=False).values
    indices = (length - 1) - (top & 0xFFFFFFFF)
    return indices.sort(dim=-1).values
