"""Tables of contiguous rows for stream_rows.cu: which have a block, which a warp, and where their candidates begin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.select.rows import SlotRows

STREAM_WARPS = 4
"""Warps of a block, which a long row has to itself."""
SHORT = 1280
"""The longest row that one warp has."""
ROOM = 192
"""Candidates that a warp lists."""


@dataclass(frozen=True, eq=False)
class RowStream:
    """Contiguous rows of which few elements are sent."""

    rows: Tensor
    guesses: Tensor
    """int32 [rows]: the magnitude from which on elements are candidates, as bits; only speed depends on it."""
    long_rows: int
    """How many there are, in front, that have a block each."""

    @property
    def blocks(self) -> int:
        return self.long_rows + -(-(len(self.rows) - self.long_rows) // STREAM_WARPS)


def warps_of(rows: SlotRows) -> int:
    return 1 if rows.length <= SHORT else STREAM_WARPS


def aim_of(rows: SlotRows) -> int:
    """Candidates that a row should have, so that chance does not make them fewer than `keep`; 0 if there is no room for them."""
    aim = math.ceil(rows.keep + 2.5 * math.sqrt(rows.keep) + 2)
    return aim if aim <= 3 * ROOM * warps_of(rows) // 4 else 0


def make_stream(slots: Sequence[tuple[SlotRows, Tensor]], device: torch.device) -> RowStream:
    """`slots` come with their rows as `describe_rows` gives them. Long rows first: no block of theirs should be the last to begin."""
    slots = sorted(slots, key=lambda slot: -slot[0].length)
    table = torch.cat([table for _, table in slots]).to(device)
    return RowStream(
        rows=table,
        guesses=torch.zeros(len(table), dtype=torch.int32, device=device),
        long_rows=sum(rows.count for rows, _ in slots if warps_of(rows) > 1),
    )
