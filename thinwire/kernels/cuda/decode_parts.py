"""What each block of decode.cu does; written once per layout."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.cuda.source import Defines
from thinwire.kernels.cuda.structs import Row, declare, i32, layout_of, make_table
from thinwire.kernels.cuda.tables import is_contiguous
from thinwire.layout import SlotRows

KINDS = ("HEADERS", "MEANS", "ROWS", "PIECES", "TILES")
HEADERS, MEANS, ROWS, PIECES, TILES = range(len(KINDS))
"""What a block does: see decode.cu."""
COLUMNS = 16
"""Strided rows that lie next to each other and are decoded together: 64 bytes. Fewer write memory in pieces that are too small,
more have room for too few elements of each."""
PIECE = 8192
"""Elements that one block decodes at most."""
DECODE_THREADS = 256
Part = declare("Part", (Row, "row"), (i32, "kind first rows start here joined"))
"""decode.cu: what a block does."""


PIECE_DEFINES: Defines = (("DECODE_THREADS", DECODE_THREADS), ("PIECE", PIECE))
"""Of decode.cuh."""
DEFINES: Defines = (
    *PIECE_DEFINES,
    ("COLUMNS", COLUMNS),
    *((name, number) for number, name in enumerate(KINDS)),
    layout_of(Part),
)


def decode_parts(slots: Sequence[SlotRows], table: Tensor, stretches: int) -> Tensor:
    """struct Part of every block.

    `table` has struct Row of all rows, numbered through all slots. `stretches` is how many of dense tensors there are. What waits
    longest for memory comes first, whole rows last.
    """
    whole: list[Tensor] = []
    pieces: list[Tensor] = []
    number = 0
    for rows in slots:
        if not is_contiguous(rows) or rows.length > PIECE:
            pieces.append(cut_pieces(rows, number))
        else:
            whole.append(cut_rows(rows, number))
        number += rows.count
    headers = stack_parts(HEADERS, torch.zeros(1), 0, 0, 0, 0)
    means = stack_parts(MEANS, torch.arange(stretches), 0, 0, 0, 0)
    parts = torch.cat([headers, means, *pieces, *whole])
    # A stretch is no row.
    heads = torch.where(parts[:, 0] == MEANS, 0, parts[:, 1])
    return torch.cat([table[heads.to(table.device)], parts.to(table.device)], 1)


def cut_rows(rows: SlotRows, first: int) -> Tensor:
    """Parts of one slot whose rows fit whole, the first of them being number `first`.

    A part has as many rows as fit and lie one behind the other; parts of one run have about the same number.
    """
    ends = torch.nonzero(rows.row_offsets().diff() != rows.length).flatten() + 1
    ends = torch.cat([ends, torch.tensor([rows.count])])
    begins = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]])
    blocks = -(-(ends - begins) // (PIECE // rows.length))
    each = (-((begins - ends) // blocks)).repeat_interleave(blocks)
    nth = torch.arange(int(blocks.sum())) - (blocks.cumsum(0) - blocks).repeat_interleave(blocks)
    heads = begins.repeat_interleave(blocks) + nth * each
    counts = torch.minimum(each, ends.repeat_interleave(blocks) - heads)
    heads, counts = heads[counts > 0], counts[counts > 0]
    return stack_parts(ROWS, first + heads, counts, 0, rows.length, 0)


def cut_pieces(rows: SlotRows, first: int) -> Tensor:
    """Parts of one slot whose rows are strided or long, the first of them being number `first`; neighbours after each other."""
    kind, fibres = (PIECES, 1) if is_contiguous(rows) else (TILES, COLUMNS)
    span = piece_span(rows.length, fibres)
    starts, heads = torch.arange(0, rows.length, span), torch.arange(0, rows.count, fibres)
    starts, heads = starts.repeat_interleave(len(heads)), heads.repeat(len(starts))
    members = (rows.count - heads).clamp(max=fibres)
    gaps = torch.zeros(rows.count, dtype=torch.int64)
    gaps[1:] = (rows.row_offsets().diff() != 1).cumsum(0)
    joined = gaps[heads] == gaps[heads + members - 1]
    here = (rows.length - starts).clamp(max=span)
    return stack_parts(kind, first + heads, members, starts, here, joined)


def stack_parts(
    kind: int,
    first: Tensor,
    rows: Tensor | int,
    start: Tensor | int,
    here: Tensor | int,
    joined: Tensor | int,
) -> Tensor:
    """int32 [blocks, fields]: struct Part without its row."""
    if not len(first):
        return torch.zeros(0, len(Part._fields_) - 1, dtype=torch.int32)
    words = ctypes.sizeof(Row) // 4
    parts = make_table(
        Part, kind=kind, first=first, rows=rows, start=start, here=here, joined=joined
    )
    return parts[:, words:]


def piece_span(length: int, fibres: int) -> int:
    """Elements of a row in one piece of so many rows: as many in each, in fours, and no more than fit."""
    pieces = -(-length // (PIECE // fibres))
    return -(-length // (4 * pieces)) * 4
