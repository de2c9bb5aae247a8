"""Dimension statistics: how many rows of each layer get nothing, under what was sent and under each selection.

This is the first claim of ADTopk ("dimension missing"): a global top-k takes its entries from few rows. Computed on
request from the last step, whose compensated gradient is still at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.topk import row_topk
from thinwire.layout import WHOLE_TENSOR, Axis, Group, Slot, SlotRows, resolve_axis, rows_along
from thinwire.memory.account import Account


@dataclass(frozen=True)
class DimensionStats:
    """Rows of one parameter in one step that got no entry."""

    step: int
    rows: int
    empty_as_sent: int
    empty_all_dimension: int
    """Under AllDimensionTopK at the same density."""
    empty_global: int
    """Under TradTopK at the same density."""


def dimension_stats(
    step: int, group: Group, account: Account, methods: Mapping[str, Any]
) -> dict[str, DimensionStats]:
    """Count for every slot of a group, before its account is settled."""
    sent = account.accepted()
    compensated = account.c + sent
    found = {}
    for slot in group.slots:
        method = methods[slot.name]
        # What was asked for as a share of the tensor; a method without a density sends what its rows say.
        rows = method.selector().rows(slot, None)
        density = getattr(method, "density", rows.entries / slot.numel)
        axis: Axis = getattr(method, "axis", "auto")
        found[slot.name] = _count(step, slot, compensated, sent, density, axis)
    return found


def _count(
    step: int, slot: Slot, compensated: Tensor, sent: Tensor, density: float, axis: Axis
) -> DimensionStats:
    dimensions = rows_along(slot, resolve_axis(slot, axis), density)
    whole = rows_along(slot, WHOLE_TENSOR, density)
    return DimensionStats(
        step,
        dimensions.count,
        _empty(dimensions, sent != 0),
        _empty(dimensions, _chosen(dimensions, compensated)),
        _empty(dimensions, _chosen(whole, compensated)),
    )


def _chosen(rows: SlotRows, compensated: Tensor) -> Tensor:
    """Mask over the flat buffer of what an exact selection in these rows takes."""
    mask = torch.zeros_like(compensated, dtype=torch.bool)
    indices = row_topk(rows.matrix(compensated), rows.keep)
    rows.matrix(mask).scatter_(-1, indices, True)
    return mask


def _empty(rows: SlotRows, mask: Tensor) -> int:
    return int((~rows.matrix(mask).any(-1)).sum())
