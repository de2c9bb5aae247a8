"""Tables of strided rows for encode_columns.cu: where their elements lie, who takes which, and room for the candidates' bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.select.rows import SlotRows

GROUP = 8
"""Columns whose words lie side by side, and that a block of columns_send takes."""
WORD_ROWS = 32
COLLECT_THREADS = 128
SEND_THREADS = 32 * GROUP
WARP_LIST = 512
BLOCK_LIST = GROUP * WARP_LIST
"""Candidates that a warp and a block list."""
LONG = 8192
"""Columns longer than this have a block each: a lane of a warp keeps eight words."""


@dataclass(frozen=True, eq=False)
class ColumnLaunch:
    """All strided rows of a group, ordered by slot and place in memory, with the buffers that their selection works in."""

    fields: Tensor
    """int64 [blocks, 7]: struct Field of encode_columns.cu."""
    columns: Tensor
    """int64 [blocks, GROUP, 10]: struct Column of every warp that sends."""
    masks: Tensor
    """int32: one bit per element that is a candidate, a thirty-second of the size of their float32 memory."""
    guesses: Tensor
    """int32 [columns]: where the search of each row starts; only speed depends on it and on `cuts`."""
    cuts: Tensor
    """float32 [columns]: the magnitude from which on elements are candidates, before the next step's ratio."""


def candidates_of(rows: SlotRows) -> int:
    """How many a row is expected to have: AIM of encode_columns.cu, or all that there are."""
    return min(rows.length, 2 * rows.keep + 16)


def make_column_launch(
    slots: Sequence[tuple[SlotRows, Tensor]], device: torch.device
) -> ColumnLaunch:
    """`slots` come with their rows as `describe_rows` gives them."""
    fields, columns = [], []
    first, words = 0, 0
    for rows, table in slots:
        # Neighbours in memory are neighbours in the launch.
        table = table[table[:, 1].argsort()]
        check_places(rows, table[:, 1])
        fields.append(cut_fields(rows, table[0], first, words))
        columns.append(cut_columns(rows, table, first, words))
        first += rows.count
        words += -(-rows.count // GROUP) * GROUP * words_of(rows)
    return ColumnLaunch(
        fields=torch.cat(fields).to(device),
        columns=torch.cat(columns).to(device),
        masks=torch.zeros(words, dtype=torch.int32, device=device),
        guesses=torch.zeros(first, dtype=torch.int32, device=device),
        cuts=torch.zeros(first, device=device),
    )


def words_of(rows: SlotRows) -> int:
    return -(-rows.length // WORD_ROWS)


def check_places(rows: SlotRows, offsets: Tensor) -> None:
    """A slot is dense in memory: `stride` rows are neighbours, and the next begin behind the last element of these."""
    numbers = torch.arange(rows.count)
    block = numbers // rows.stride * rows.stride * rows.length
    assert torch.equal(offsets - offsets[0], block + numbers % rows.stride), rows


def cut_fields(rows: SlotRows, head: Tensor, first: int, masks: int) -> Tensor:
    """The blocks of columns_collect for one slot, `head` being its first row."""
    gradient, memory = int(head[0]), int(head[1])
    slot = int(head[5]) >> 32
    aligned = rows.stride % 4 == 0 and gradient % 4 == 0 and memory % 4 == 0
    width = 4 if aligned else 1
    items = rows.count // width * words_of(rows)
    starts = torch.arange(0, items, COLLECT_THREADS)
    same = [
        gradient,
        memory,
        masks,
        rows.length | rows.stride << 32,
        rows.count | slot << 32,
    ]
    columns = [torch.full_like(starts, number) for number in same]
    return torch.stack([*columns, first | starts << 32, torch.full_like(starts, width)], 1)


def cut_columns(rows: SlotRows, table: Tensor, first: int, masks: int) -> Tensor:
    """The warps of columns_send for one slot: one for a column, or all of a block for one that would keep a warp too long.

    In the last block may be warps without a column: zeros.
    """
    together = rows.length > LONG or candidates_of(rows) > WARP_LIST
    numbers = torch.arange(rows.count)
    places = masks + numbers // GROUP * GROUP * words_of(rows) + numbers % GROUP
    more = torch.stack([places, first + numbers | int(together) << 32], 1)
    columns = torch.cat([table, more], 1)
    if together:
        return columns[:, None].repeat(1, GROUP, 1)
    missing = -rows.count % GROUP
    return torch.cat([columns, columns.new_zeros(missing, columns.shape[1])]).unflatten(
        0, (-1, GROUP)
    )
