"""What each block of decode.cu does; written once per layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.cuda.tables import is_contiguous
from thinwire.select.rows import SlotRows

HEADERS, MEANS, ROWS, PIECES, TILES = range(5)
"""What a block of decode.cu does."""
COLUMNS = 16
"""Strided rows that lie next to each other and are decoded together: 64 bytes. Fewer write memory in pieces that are too small,
more have room for too few elements of each."""
PIECE = 8192
"""Elements that one block decodes at most."""
DECODE_THREADS = 256


def decode_parts(slots: Sequence[SlotRows], table: Tensor, stretches: int) -> Tensor:
    """int64 [blocks, 11]: struct Part of decode.cu, two 32-bit numbers to a word.

    `table` has struct Row of all rows, numbered through all slots; `stretches` of dense tensors are beside them. What waits
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
    first = [[HEADERS, 0, 0, 0, 0, 0], *([MEANS, which, 0, 0, 0, 0] for which in range(stretches))]
    parts = torch.cat([torch.tensor(first, dtype=torch.int32), *pieces, *whole])
    # A stretch is no row.
    heads = torch.where(parts[:, 0] == MEANS, 0, parts[:, 1])
    return torch.cat([table[heads.to(table.device)], parts.view(torch.int64).to(table.device)], 1)


def cut_rows(rows: SlotRows, first: int) -> Tensor:
    """Parts of one slot whose rows, the `first` of them so numbered, fit whole: as many as do that lie one behind the other."""
    ends = torch.nonzero(rows.row_offsets().diff() != rows.length).flatten() + 1
    ends = torch.cat([ends, torch.tensor([rows.count])])
    begins = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]])
    blocks = -(-(ends - begins) // (PIECE // rows.length))
    # Of as many rows as each other.
    each = (-((begins - ends) // blocks)).repeat_interleave(blocks)
    nth = torch.arange(int(blocks.sum())) - (blocks.cumsum(0) - blocks).repeat_interleave(blocks)
    heads = begins.repeat_interleave(blocks) + nth * each
    counts = torch.minimum(each, ends.repeat_interleave(blocks) - heads)
    heads, counts = heads[counts > 0], counts[counts > 0]
    return stack_parts(ROWS, first + heads, counts, 0, rows.length, 0)


def cut_pieces(rows: SlotRows, first: int) -> Tensor:
    """Parts of one slot whose rows, the `first` of them so numbered, are strided or long; neighbours after each other."""
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


def stack_parts(kind: int, first: Tensor, *fields: Tensor | int) -> Tensor:
    """int32 [blocks, 6]: what is in struct Part behind its row."""
    columns = [torch.as_tensor(field).expand(len(first)) for field in (kind, first, *fields)]
    return torch.stack(columns, 1).int()


def piece_span(length: int, fibres: int) -> int:
    """Elements of a row in one piece of so many rows: as many in each, in fours, and no more than fit."""
    pieces = -(-length // (PIECE // fibres))
    return -(-length // (4 * pieces)) * 4
