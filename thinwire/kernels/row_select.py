"""Exact row top-k of a whole table of rows in a few launches on CUDA.

The torch way needs one sort-like pass per tensor; here a program holds a few rows in registers, finds the k-th magnitude
by bisecting its bit pattern (magnitudes of finite floats order like their bits) and writes the chosen indices in ascending
order. One pass over memory, no host wait. Reference: `kernels.topk.row_topk_reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.select.rows import SlotRows

# A program's tile, in elements: what fits the registers of a few warps.
MAX_TILE = 8192
# Neighbouring strided rows that one program takes together, so that its loads are coalesced.
STRIDED_ROWS = 16


@dataclass(frozen=True, eq=False)
class Launch:
    """Rows that share a tile shape: one kernel launch."""

    rows_per_program: int
    block: int
    table: Tensor
    """int64 [rows, 5]: flat offset, length, stride, keep, first output place."""


def tile_of(rows: SlotRows) -> tuple[int, int] | None:
    """(rows per program, padded length), or None if a row does not fit a tile."""
    block = max(16, triton.next_power_of_2(rows.length))
    together = STRIDED_ROWS if rows.stride != 1 else max(1, min(16, 1024 // block))
    if block * together > MAX_TILE and rows.stride != 1:
        together = max(1, MAX_TILE // block)
    return (together, block) if block * together <= MAX_TILE else None


def plan_launches(slots: Sequence[tuple[SlotRows, int]], device: torch.device) -> list[Launch]:
    """One launch per tile shape; `slots` are (rows, first output place) pairs that have a tile."""
    tables: dict[tuple[int, int], list[Tensor]] = {}
    for rows, first_place in slots:
        shape = tile_of(rows)
        assert shape is not None
        table = torch.empty(rows.count, 5, dtype=torch.int64)
        table[:, 0] = rows.row_offsets()
        table[:, 1] = rows.length
        table[:, 2] = rows.stride
        table[:, 3] = rows.keep
        table[:, 4] = first_place + torch.arange(rows.count) * rows.keep
        tables.setdefault(shape, []).append(table)
    return [
        Launch(together, block, torch.cat(parts).to(device))
        for (together, block), parts in tables.items()
    ]


def select_rows(c: Tensor, launches: Sequence[Launch], indices: Tensor) -> None:
    """Write the row-local indices of every row's largest magnitudes into `indices` (int32, one per entry)."""
    for launch in launches:
        count = launch.table.shape[0]
        grid = (triton.cdiv(count, launch.rows_per_program),)
        _select_rows[grid](
            c,
            launch.table,
            indices,
            count,
            ROWS=launch.rows_per_program,
            BLOCK=launch.block,
            num_warps=max(1, min(16, launch.rows_per_program * launch.block // 512)),
        )


@triton.jit
def _select_rows(c, table, indices, count, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < count
    offset = tl.load(table + row * 5, mask=live, other=0)
    length = tl.load(table + row * 5 + 1, mask=live, other=0)
    stride = tl.load(table + row * 5 + 2, mask=live, other=0)
    keep = tl.load(table + row * 5 + 3, mask=live, other=0).to(tl.int32)
    place = tl.load(table + row * 5 + 4, mask=live, other=0)
    j = tl.arange(0, BLOCK)
    inside = j[None, :] < length[:, None]
    values = tl.load(c + offset[:, None] + j[None, :] * stride[:, None], mask=inside, other=0.0)
    # Without the sign bit; -1 outside the row, below every magnitude.
    bits = tl.where(inside, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    # Bisect for a threshold with at least `keep` magnitudes at or above it and fewer above the next one. Most rows stop
    # early, at a value that exactly `keep` magnitudes reach; only ties go on to the last bit.
    threshold = tl.zeros([ROWS], dtype=tl.int32)
    beyond = tl.max(bits, axis=1) + 1
    reached = length.to(tl.int32)
    searching = (reached != keep) & (beyond - threshold > 1)
    while tl.max(searching.to(tl.int32), axis=0) > 0:
        middle = threshold + (beyond - threshold) // 2
        at_least = tl.sum((bits >= middle[:, None]).to(tl.int32), axis=1)
        enough = at_least >= keep
        threshold = tl.where(searching & enough, middle, threshold)
        reached = tl.where(searching & enough, at_least, reached)
        beyond = tl.where(searching & ~enough, middle, beyond)
        searching = (reached != keep) & (beyond - threshold > 1)
    above = bits > threshold[:, None]
    tied = bits == threshold[:, None]
    missing = keep - tl.sum(above.to(tl.int32), axis=1)
    first_tied = tied & (tl.cumsum(tied.to(tl.int32), axis=1) <= missing[:, None])
    chosen = above | first_tied
    order = tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    target = indices + place[:, None] + order
    tl.store(target, (j[None, :] + tl.zeros([ROWS, 1], tl.int32)), mask=chosen & live[:, None])
