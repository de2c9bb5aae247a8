"""Exact top-k of every row of a table: one call per bucket, the fast kernel where there is one."""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.kernels.topk import row_topk

if TYPE_CHECKING:
    from thinwire.kernels.row_select import Launch
    from thinwire.select.rows import RowTable

logger = logging.getLogger(__name__)


@functools.cache
def has_triton() -> bool:
    """Whether the CUDA kernels can be used; says so once if not."""
    if importlib.util.find_spec("triton") is None:
        logger.warning(
            "triton is not installed; selection on CUDA falls back to torch and is many times slower"
        )
        return False
    return True


def exact_topk(c: Tensor, table: RowTable) -> Tensor:
    """int64 [entries]: row-local indices of the `keep` largest magnitudes of every row, ascending inside the row."""
    if c.is_cuda and c.dtype == torch.float32 and has_triton():
        return select_with_kernel(c, table)
    parts = [row_topk(rows.matrix(c), rows.keep).reshape(-1) for rows in table.rows]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=c.device)


def select_with_kernel(c: Tensor, table: RowTable) -> Tensor:
    """Rows that fit a tile in one launch per tile shape, the few long ones by torch."""
    from thinwire.kernels.row_select import plan_launches, select_rows, tile_of

    if table not in _launches:
        short = [
            (rows, first)
            for rows, first in zip(table.rows, table.entry_starts, strict=False)
            if tile_of(rows) is not None
        ]
        _launches[table] = plan_launches(short, c.device)
    indices = torch.empty(table.entries, dtype=torch.int32, device=c.device)
    select_rows(c, _launches[table], indices)
    for which, rows in enumerate(table.rows):
        if tile_of(rows) is None:
            indices[table.slot_slice(which)] = row_topk(rows.matrix(c), rows.keep).reshape(-1).int()
    return indices.long()


_launches: WeakKeyDictionary[RowTable, list[Launch]] = WeakKeyDictionary()
