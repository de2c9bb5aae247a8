"""Tables of contiguous rows for collect_rows.cu: who takes which, and room for the candidates' bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.cuda.columns import COLLECT_THREADS
from thinwire.select.rows import SlotRows

WARP = 32
PART = 1024
"""Elements of a row that a warp of rows_collect has at most, one word of bits per lane."""
SEND_WARPS = 4
"""Warps of a block of rows_send, which a long row has to itself."""
SHORT = 1280
"""The longest row that rows_send gives to one warp."""
ROOM = 192
"""Candidates that a warp of rows_send lists."""


@dataclass(frozen=True, eq=False)
class RowCollection:
    """Contiguous rows of which few elements are sent, with the buffers that their selection works in."""

    rows: Tensor
    parts: Tensor
    """int64 [parts, 4]: struct Part of collect_rows.cu."""
    firsts: Tensor
    """int32 [rows]: the number of each row's first part."""
    masks: Tensor
    """int32 [parts, 32]: one bit per element that is a candidate; a thirty-second of the size of their float32 memory for rows of
    1024 elements and for long ones, more for shorter ones."""
    guesses: Tensor
    """int32 [rows]: the magnitude from which on elements are candidates, as bits; only speed depends on it."""
    long_rows: int
    """How many there are, in front, that have a block of rows_send each."""

    @property
    def collect_blocks(self) -> int:
        return -(-len(self.parts) * WARP // COLLECT_THREADS)

    @property
    def send_blocks(self) -> int:
        return self.long_rows + -(-(len(self.rows) - self.long_rows) // SEND_WARPS)


def send_warps(rows: SlotRows) -> int:
    return 1 if rows.length <= SHORT else SEND_WARPS


def aim_of(rows: SlotRows) -> int:
    """Candidates that a row should have, so that chance does not make them fewer than `keep`; 0 if there is no room for them."""
    aim = math.ceil(rows.keep + 2.5 * math.sqrt(rows.keep) + 2)
    return aim if aim <= 3 * ROOM * send_warps(rows) // 4 else 0


def part_length(rows: SlotRows) -> int:
    """Parts of a row are as long as each other, in fours, but for the last."""
    parts = -(-rows.length // PART)
    return -(-rows.length // (4 * parts)) * 4


def collect_rows(slots: Sequence[tuple[SlotRows, Tensor]], device: torch.device) -> RowCollection:
    """`slots` come with their rows as `describe_rows` gives them. Long rows first: no block of theirs should be the last to begin."""
    slots = sorted(slots, key=lambda slot: -slot[0].length)
    parts: list[Tensor] = []
    firsts: list[Tensor] = []
    row, part = 0, 0
    for rows, table in slots:
        parts.append(cut_parts(rows, table, row))
        each = len(parts[-1]) // rows.count
        firsts.append(part + each * torch.arange(rows.count, dtype=torch.int32))
        row += rows.count
        part += len(parts[-1])
    return RowCollection(
        rows=torch.cat([table for _, table in slots]).to(device),
        parts=torch.cat(parts).to(device),
        firsts=torch.cat(firsts).to(device),
        masks=torch.zeros(part, WARP, dtype=torch.int32, device=device),
        guesses=torch.zeros(row, dtype=torch.int32, device=device),
        long_rows=sum(rows.count for rows, _ in slots if send_warps(rows) > 1),
    )


def cut_parts(rows: SlotRows, table: Tensor, first: int) -> Tensor:
    """The parts of one slot, whose rows are numbered from `first` on."""
    starts = torch.arange(0, rows.length, part_length(rows))
    counts = (rows.length - starts).clamp(max=part_length(rows))
    numbers = torch.arange(first, first + rows.count)
    slot = int(table[0, 5]) >> 32
    lie = (table[:, 6] >> 32).unsqueeze(1)
    columns = [
        table[:, 0:1] + starts,
        table[:, 1:2] + starts,
        (numbers | slot << 32).unsqueeze(1) + torch.zeros_like(starts),
        counts | lie << 32,
    ]
    return torch.stack(columns, 2).flatten(0, 1)
