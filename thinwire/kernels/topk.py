"""Top-k of each row by magnitude, ties to the lowest index, result in ascending index order.

`row_topk_reference` reads like the definition; `row_topk` is the same function without a full sort.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire.kernels.tournament import Strip, Tournament, choose, pays


def row_topk_reference(matrix: Tensor, keep: int) -> Tensor:
    """Indices [..., keep] of the `keep` largest |x| on the last dimension."""
    order = matrix.abs().sort(dim=-1, descending=True, stable=True).indices
    return order[..., :keep].sort(dim=-1).values


def row_topk(matrix: Tensor, keep: int) -> Tensor:
    """Equal to the reference for every finite input."""
    length = matrix.shape[-1]
    if keep == length:
        return torch.arange(length, device=matrix.device).expand(matrix.shape)
    if matrix.device.type == "cpu":
        return _row_topk_on_cpu(matrix, keep)
    if matrix.dtype == torch.float64:
        return row_topk_reference(matrix, keep)
    return _by_keys(matrix, keep)


def _row_topk_on_cpu(matrix: Tensor, keep: int) -> Tensor:
    rows, length = math.prod(matrix.shape[:-1]), matrix.shape[-1]
    if pays(matrix.numel(), length, keep, matrix.dtype):
        strip = Strip(offset=0, outer=rows, pitch=length, inner=1)
        chosen, _ = Tournament([strip], length, keep).run(matrix.reshape(-1))
    else:
        chosen = choose(matrix.abs().reshape(rows, length), keep)
    return chosen.view(*matrix.shape[:-1], keep)


def _by_keys(matrix: Tensor, keep: int) -> Tensor:
    """Magnitude bits and the mirrored index form one 64-bit key per element, all different.

    Plain top-k then has no ties to break and the answer is the same on every device, without a host wait.
    """
    length = matrix.shape[-1]
    magnitude = matrix.abs().float().view(torch.int32).long()
    mirrored = torch.arange(length - 1, -1, -1, device=matrix.device)
    keys = magnitude.bitwise_left_shift_(32).bitwise_or_(mirrored)
    top = keys.topk(keep, dim=-1, sorted=False).values
    indices = (length - 1) - (top & 0xFFFFFFFF)
    return indices.sort(dim=-1).values
