"""Tables of contiguous rows of which few elements are sent (stream_rows.cu)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.cuda.source import Defines
from thinwire.layout import SlotRows

STREAM_WARPS = 4
"""Warps of a block. A long row has all of them, a short row has one."""
SHORT = 1280
"""The longest row that one warp has."""
WARP_ROOM = 192
"""Candidates that a warp lists."""
DEFINES: Defines = (("STREAM_WARPS", STREAM_WARPS), ("WARP_ROOM", WARP_ROOM))


@dataclass(frozen=True, eq=False)
class RowStream:
    """Contiguous rows of which few elements are sent."""

    rows: Tensor
    """struct Row"""
    guesses: Tensor
    """int32 [rows]: the magnitude from which on elements are candidates, as bits. Only speed depends on it."""
    long_rows: int
    """How many rows, the first ones, have a block each."""

    @property
    def blocks(self) -> int:
        return self.long_rows + -(-(len(self.rows) - self.long_rows) // STREAM_WARPS)


def warps_of(rows: SlotRows) -> int:
    return 1 if rows.length <= SHORT else STREAM_WARPS


def aim_of(rows: SlotRows) -> int:
    """Candidates that a row should have: so many that chance does not leave fewer than `keep`. 0 if a block cannot list them."""
    aim = math.ceil(rows.keep + 2.5 * math.sqrt(rows.keep) + 2)
    return aim if aim <= 3 * WARP_ROOM * warps_of(rows) // 4 else 0


def make_stream(slots: Sequence[tuple[SlotRows, Tensor]], device: torch.device) -> RowStream:
    """`slots` come with their rows as `describe_rows` gives them. Long rows start first, so that none of them ends last."""
    slots = sorted(slots, key=lambda slot: -slot[0].length)
    table = torch.cat([table for _, table in slots]).to(device)
    return RowStream(
        rows=table,
        guesses=torch.zeros(len(table), dtype=torch.int32, device=device),
        long_rows=sum(rows.count for rows, _ in slots if warps_of(rows) > 1),
    )
