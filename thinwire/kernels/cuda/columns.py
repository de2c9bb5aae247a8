"""Tables of strided rows (encode_columns.cu): where their elements lie, who takes them, and room for candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.cuda.source import Defines
from thinwire.kernels.cuda.structs import (
    Row,
    declare,
    i32,
    i64,
    layout_of,
    make_table,
    read_column,
)
from thinwire.kernels.cuda.tuning import Tuning
from thinwire.layout import SlotRows

GROUP = 8
"""Columns whose words lie side by side. A block of columns_send takes as many."""
WORD_ROWS = 32
"""Elements of a column whose bits are one word."""
COLLECT_THREADS = 128
SEND_THREADS = 32 * GROUP
WARP_LIST = 512
"""Candidates that a warp lists."""
BLOCK_LIST = GROUP * WARP_LIST
LANE_WORDS = 8
"""Words that a lane keeps of a column that a warp has to itself."""
WARP_COLUMN = 32 * LANE_WORDS * WORD_ROWS
"""Elements of such a column, at most."""
CANDIDATES_PER_ENTRY = 2
SPARE_CANDIDATES = 16
"""Candidates aimed at: enough that chance does not leave too few, and not many that are read for nothing."""
ColumnBlock = declare(
    "ColumnBlock",
    (i64, "gradient memory masks"),
    (i32, "length stride columns slot first start width unused"),
)
"""encode_columns.cu: what a block of columns_collect takes."""
Column = declare("Column", (Row, "row"), (i64, "masks"), (i32, "number together"))
"""encode_columns.cu: what a warp of columns_send takes."""


DEFINES: Defines = (
    ("GROUP", GROUP),
    ("WORD_ROWS", WORD_ROWS),
    ("COLLECT_THREADS", COLLECT_THREADS),
    ("WARP_LIST", WARP_LIST),
    ("LANE_WORDS", LANE_WORDS),
    ("CANDIDATES_PER_ENTRY", CANDIDATES_PER_ENTRY),
    ("SPARE_CANDIDATES", SPARE_CANDIDATES),
    *map(layout_of, (ColumnBlock, Column)),
)


@dataclass(frozen=True, eq=False)
class ColumnLaunch:
    """All strided rows of a group, ordered by slot and place in memory, with the buffers of their selection."""

    blocks: Tensor
    """struct ColumnBlock"""
    columns: Tensor
    """int32 [blocks, GROUP, words]: struct Column of every warp that sends."""
    masks: Tensor
    """int32: one bit per element, set for candidates. A thirty-second of the size of their float32 memory."""
    guesses: Tensor
    """int32 [columns]: where the search of each column starts. Only speed depends on it and on `cuts`."""
    cuts: Tensor
    """float32 [columns]: the magnitude from which on elements are candidates, before the next step's ratio."""


def candidates_of(rows: SlotRows) -> int:
    """How many a column is expected to have."""
    return min(rows.length, CANDIDATES_PER_ENTRY * rows.keep + SPARE_CANDIDATES)


def make_column_launch(
    slots: Sequence[tuple[SlotRows, Tensor]], tuning: Tuning, device: torch.device
) -> ColumnLaunch:
    """`slots` come with their rows as `describe_rows` gives them."""
    blocks, columns = [], []
    first, words = 0, 0
    for rows, table in slots:
        # Neighbours in memory are neighbours in the launch.
        table = table[read_column(Row, table, "memory").argsort()]
        check_places(rows, read_column(Row, table, "memory"))
        blocks.append(cut_blocks(rows, table[:1], first, words))
        columns.append(cut_columns(rows, table, first, words, tuning))
        first += rows.count
        words += -(-rows.count // GROUP) * GROUP * words_of(rows)
    return ColumnLaunch(
        blocks=torch.cat(blocks).to(device),
        columns=torch.cat(columns).to(device),
        masks=torch.zeros(words, dtype=torch.int32, device=device),
        guesses=torch.zeros(first, dtype=torch.int32, device=device),
        cuts=torch.zeros(first, device=device),
    )


def words_of(rows: SlotRows) -> int:
    return -(-rows.length // WORD_ROWS)


def check_places(rows: SlotRows, offsets: Tensor) -> None:
    """A slot is dense in memory: `stride` rows are neighbours, and the next ones begin behind their last element."""
    numbers = torch.arange(rows.count)
    block = numbers // rows.stride * rows.stride * rows.length
    assert torch.equal(offsets - offsets[0], block + numbers % rows.stride), rows


def cut_blocks(rows: SlotRows, head: Tensor, first: int, masks: int) -> Tensor:
    """The blocks of columns_collect for one slot; `head` has its first row."""
    gradient, memory = (int(read_column(Row, head, name)) for name in ("gradient", "memory"))
    aligned = rows.stride % 4 == 0 and gradient % 4 == 0 and memory % 4 == 0
    width = 4 if aligned else 1
    items = rows.count // width * words_of(rows)
    return make_table(
        ColumnBlock,
        gradient=gradient,
        memory=memory,
        masks=masks,
        length=rows.length,
        stride=rows.stride,
        columns=rows.count,
        slot=int(read_column(Row, head, "slot")),
        first=first,
        start=torch.arange(0, items, COLLECT_THREADS),
        width=width,
    )


def cut_columns(rows: SlotRows, table: Tensor, first: int, masks: int, tuning: Tuning) -> Tensor:
    """The warps of columns_send for one slot: one for a column, or all of a block for one that would keep a warp too long.

    Warps of the last block may have no column: zeros.
    """
    longest = tuning.warp_column_elements or WARP_COLUMN
    assert longest <= WARP_COLUMN
    together = rows.length > longest or candidates_of(rows) > WARP_LIST
    numbers = torch.arange(rows.count)
    places = masks + numbers // GROUP * GROUP * words_of(rows) + numbers % GROUP
    columns = make_table(
        Column, row=table, masks=places, number=first + numbers, together=int(together)
    )
    if together:
        return columns[:, None].repeat(1, GROUP, 1)
    missing = columns.new_zeros(-rows.count % GROUP, columns.shape[1])
    return torch.cat([columns, missing]).unflatten(0, (-1, GROUP))
