"""Exact top-k of rows on CUDA outside the fused path (select_rows.cu): many rows of a flat tensor in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.cuda.source import Defines
from thinwire.kernels.cuda.structs import declare, i32, i64, layout_of, make_table
from thinwire.kernels.cuda.toolchain import Toolchain
from thinwire.layout import SlotRows

WARP = 32
SELECT_WARPS = 8
"""Warps of a block. A long row has all of them, a short row has one."""
LANE_ELEMENTS = 32
"""Elements of a row that a lane has registers for."""
SHORT = WARP * LANE_ELEMENTS
"""The longest row that one warp has."""
LONGEST = SELECT_WARPS * SHORT
SelectedRow = declare("SelectedRow", (i64, "offset place"), (i32, "length stride keep unused"))
"""select_rows.cu: a row and where its indices go."""
DEFINES: Defines = (
    ("SELECT_WARPS", SELECT_WARPS),
    ("LANE_ELEMENTS", LANE_ELEMENTS),
    layout_of(SelectedRow),
)


class RowSelect:
    """Rows of at most `LONGEST` elements of one flat float32 tensor, with the place of each slot's first entry."""

    def __init__(
        self, toolchain: Toolchain, slots: Sequence[tuple[SlotRows, int]], device: torch.device
    ) -> None:
        # Long rows start first, so that none of them ends last.
        slots = sorted(slots, key=lambda slot: -slot[0].length)
        self.rows = torch.cat([describe(*slot) for slot in slots]).to(device)
        """What every row's warps are told."""
        self._long_rows = sum(rows.count for rows, _ in slots if rows.length > SHORT)
        self._kernel = toolchain.compile("select_rows.cu", "select_rows", DEFINES)

    def select(self, c: Tensor, indices: Tensor, values: Tensor) -> None:
        """Write row-local indices (int64), ascending in each row, and what c has there."""
        count, long_rows = len(self.rows), self._long_rows
        blocks = long_rows + -(-(count - long_rows) // SELECT_WARPS)
        args = [c, self.rows, indices, values, long_rows, count]
        self._kernel(blocks, WARP * SELECT_WARPS, args)


def describe(rows: SlotRows, first: int) -> Tensor:
    """struct SelectedRow of one slot whose entries begin at `first`."""
    offsets = rows.row_offsets()
    # Neighbours in memory are neighbours in the launch.
    offsets, order = offsets.sort()
    return make_table(
        SelectedRow,
        offset=offsets,
        place=first + order * rows.keep,
        length=rows.length,
        stride=rows.stride,
        keep=rows.keep,
    )
