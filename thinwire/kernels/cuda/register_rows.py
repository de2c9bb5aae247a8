"""Tables of contiguous rows that lie in registers while they are chosen from (encode_rows.cu)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.cuda.source import Defines
from thinwire.kernels.cuda.structs import declare, i32, layout_of, make_table

WARP = 32
ROW_WARP_COUNTS = (1, 4, 8, 16)
"""Warps of a row in registers. Two would wait for each other as often as four do, and were slower for every length tried."""
SHORT_ROWS = 4
"""Rows of one warp in a block."""
LONG_SHAPES = 16
"""The first bit of SHAPES for rows of several warps."""
MAX_ELEMENTS = 40
"""Elements of a row per lane: what fits in registers beside the search."""
MOST_ELEMENTS = 64
"""The same for the longest rows, which have no more warps to spread over."""
RowBlock = declare("RowBlock", (i32, "shape first rows"))
"""encode_rows.cu: what a block takes."""


@dataclass(frozen=True, eq=False)
class RegisterRows:
    """Contiguous rows whose blocks have the same number of threads."""

    warps: int
    """Of a block. A long row has all of them, short rows have one each."""
    shapes: int
    """SHAPES of encode_rows.cu."""
    rows: Tensor
    """struct Row"""
    blocks: Tensor
    """struct RowBlock"""
    guesses: Tensor
    """int32 [rows]: where the search of each row starts. Only speed depends on it."""

    @property
    def defines(self) -> Defines:
        shapes = (("BLOCK_WARPS", self.warps), ("SHAPES", self.shapes))
        return (*shapes, ("LONG_SHAPES", LONG_SHAPES), layout_of(RowBlock))


def register_shape(length: int) -> tuple[int, int] | None:
    """(warps, elements per lane) of the fewest warps that hold a row, None if it is too long."""
    for warps in ROW_WARP_COUNTS:
        elements = -(-length // (4 * WARP * warps)) * 4
        if elements <= (MAX_ELEMENTS if warps < ROW_WARP_COUNTS[-1] else MOST_ELEMENTS):
            return warps, elements
    return None


def launch_of(warps: int, elements: int) -> tuple[int, int]:
    """What rows have to agree on to share a launch: (warps of a block, elements per lane or 0).

    Shapes of very long rows have a launch each. They fill it, and several of them would take long to compile.
    """
    return (SHORT_ROWS, 0) if warps <= SHORT_ROWS else (warps, elements)


def shape_bit(warps: int, elements: int) -> int:
    """Which bit of SHAPES stands for rows of this shape."""
    return elements // 4 - 1 + (0 if warps == 1 else LONG_SHAPES)


def make_register_rows(
    block_warps: int, shapes: dict[tuple[int, int], list[Tensor]], device: torch.device
) -> RegisterRows:
    """Longer rows start first, so that none of them ends last."""
    tables: list[Tensor] = []
    blocks: list[Tensor] = []
    first, bits = 0, 0
    for (warps, elements), mine in sorted(shapes.items(), key=lambda item: -item[0][1]):
        bit = shape_bit(warps, elements)
        bits |= 1 << bit
        count, each = sum(map(len, mine)), block_warps if warps == 1 else 1
        starts = torch.arange(0, count, each)
        rows = (count - starts).clamp(max=each)
        blocks.append(make_table(RowBlock, shape=bit, first=first + starts, rows=rows))
        tables += mine
        first += count
    return RegisterRows(
        block_warps,
        bits,
        torch.cat(tables).to(device),
        torch.cat(blocks).to(device),
        torch.zeros(first, dtype=torch.int32, device=device),
    )
