"""What each block of decode.cu does; written once per layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.cuda.tables import is_contiguous
from thinwire.select.rows import SlotRows

HEADERS, MEANS, PIECES, TILES = range(4)
"""What a block of decode.cu does, if it does not add up whole rows."""
COLUMNS = 8
"""Strided rows that lie next to each other and are decoded together: 32 bytes, the unit in which memory is read."""
PIECE = 8192
"""Elements that one block decodes of rows that are cut."""
DECODE_THREADS = 256
ROW_THREADS = {8: 64, 32: 1024, 64: 2048, 128: 4096, 256: 8192}
"""By the threads that decode a row: its length at most. From 32 on that is what shared memory has for as many threads; a few
entries in a very short row keep few threads busy."""


def decode_parts(slots: Sequence[SlotRows], stretches: int) -> Tensor:
    """int32 [blocks, 4]: struct Part of decode.cu, rows numbered through all slots, `stretches` of dense tensors beside them.

    What waits longest for memory comes first, short rows last.
    """
    runs: list[tuple[int, int, int]] = []
    pieces: list[Tensor] = []
    number = 0
    for rows in slots:
        threads = row_threads(rows)
        if threads is None:
            pieces.append(cut_pieces(rows, number))
        elif runs and runs[-1][0] == threads and sum(runs[-1][1:]) == number:
            # Rows of several slots fill a block.
            runs[-1] = (threads, runs[-1][1], runs[-1][2] + rows.count)
        else:
            runs.append((threads, number, rows.count))
        number += rows.count
    first = [[HEADERS, 0, 0, 0], *([MEANS, which, 0, 0] for which in range(stretches))]
    short = [cut_run(*run) for run in sorted(runs, key=lambda run: -run[0])]
    return torch.cat([torch.tensor(first, dtype=torch.int32), *pieces, *short])


def row_threads(rows: SlotRows) -> int | None:
    """Threads that decode one of these rows; None if it is cut into pieces."""
    if not is_contiguous(rows):
        return None
    return next((threads for threads, most in ROW_THREADS.items() if rows.length <= most), None)


def cut_run(threads: int, first: int, count: int) -> Tensor:
    """Parts of neighbouring rows that have as many threads each."""
    each = DECODE_THREADS // threads
    starts = torch.arange(0, count, each, dtype=torch.int32)
    kind, nothing = torch.full_like(starts, threads), torch.zeros_like(starts)
    return torch.stack([kind, first + starts, (count - starts).clamp(max=each), nothing], 1)


def cut_pieces(rows: SlotRows, first: int) -> Tensor:
    """Parts of one slot whose rows, the `first` of them so numbered, are strided or long."""
    kind, fibres = (PIECES, 1) if is_contiguous(rows) else (TILES, COLUMNS)
    heads = torch.arange(0, rows.count, fibres, dtype=torch.int32)
    starts = torch.arange(0, rows.length, piece_span(rows.length, fibres), dtype=torch.int32)
    heads, starts = heads.repeat_interleave(len(starts)), starts.repeat(len(heads))
    members = (rows.count - heads).clamp(max=fibres)
    return torch.stack([torch.full_like(heads, kind), first + heads, members, starts], 1)


def piece_span(length: int, fibres: int) -> int:
    """Elements of a row in one piece of so many rows: as many in each, in fours, and no more than fit."""
    pieces = -(-length // (PIECE // fibres))
    return -(-length // (4 * pieces)) * 4
