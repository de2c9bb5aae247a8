"""SplitTables: who owns what of a group and where it has its place in messages, as the kernels of split.cu and tree.cu read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.cuda.chunks import BINS
from thinwire.kernels.cuda.clear import Cleared
from thinwire.kernels.cuda.prepared import payload_defines
from thinwire.kernels.cuda.source import Defines
from thinwire.kernels.cuda.structs import declare, i32, i64, layout_of, make_rows, pointer
from thinwire.layout import Group, RowTable

MOST_OWNERS = 128
"""Ranks that a block has counters for."""
RANGE = 4096
"""Indices of a region whose sums one block has in shared memory."""
RANGE_THREADS = 256
EMIT_WARPS = 8
FINISH_THREADS = 256
MOST_RECORDS = 30
"""Buckets that one launch settles."""

SplitSlot = declare(
    "SplitSlot",
    (i64, "bucket"),
    (i32, "begin end block first edge last shift start room entry keep"),
    (i32, "back_start back_room winners chunk chunks range ranges"),
)
PickChunk = declare("PickChunk", (i32, "entry count slot"))
SumRange = declare("SumRange", (i32, "begin end slot"))
RangeState = declare("RangeState", (i32, "list count end place"))
Spot = declare("Spot", (i32, "owner first"))
Cut = declare("Cut", (i32, "low last"))
SplitForm = declare("SplitForm", (i32, "head total row back slots blocks rank world"))
SplitRecord = declare(
    "SplitRecord",
    (pointer, "memory offer sums lost mates slots place_slots back_slots starts"),
    (i64, "numel"),
    (SplitForm, "form"),
)
SIZES: Defines = (
    ("BINS", BINS),
    ("CHUNK", BINS),
    ("RANGE", RANGE),
    ("RANGE_THREADS", RANGE_THREADS),
    ("EMIT_WARPS", EMIT_WARPS),
    ("FINISH_THREADS", FINISH_THREADS),
    ("MOST_OWNERS", MOST_OWNERS),
    ("MOST_RECORDS", MOST_RECORDS),
    *map(
        layout_of,
        (SplitSlot, PickChunk, SumRange, RangeState, Spot, Cut, Cleared, SplitForm, SplitRecord),
    ),
)


def split_defines(wire: torch.dtype) -> Defines:
    """For values of this dtype on the wire."""
    narrow = int(wire != torch.float32)
    return (*payload_defines(wire, torch.float32, packed=False), ("NARROW", narrow), *SIZES)


@dataclass(frozen=True, eq=False)
class SplitTables:
    """Columns have a number for every slot."""

    edges: Sequence[int]
    """Where each slot begins in a region, and the end."""
    blocks: Sequence[int]
    """The first block of each slot, of all blocks."""
    firsts: Sequence[int]
    """The same in a region."""
    shifts: Sequence[int]
    """log2 of the size of its blocks."""
    rooms: Sequence[int]
    """Places of a slot in a message to an owner,"""
    back: Sequence[int]
    """and in one of an owner's sums."""
    winners: Sequence[int]
    """Sums of a slot that are kept, of all owners together."""
    owners: Tensor
    """By block: its owner,"""
    begins: Tensor
    """and its first index there."""
    starts: Tensor
    """By owner and block of its region: the first position."""
    region_blocks: int


Columns = dict[str, Any]


def cut_entries(table: RowTable) -> list[Columns]:
    """Columns of struct PickChunk, slot by slot."""
    parts = []
    for slot, rows in enumerate(table.rows):
        starts = torch.arange(0, rows.entries, BINS)
        counts = (rows.entries - starts).clamp(max=BINS)
        parts.append({"entry": table.entry_starts[slot] + starts, "count": counts, "slot": slot})
    return parts


def cut_ranges(edges: Sequence[int], size: int = RANGE) -> list[Columns]:
    """Columns of struct SumRange, slot by slot."""
    parts = []
    for slot, (begin, end) in enumerate(pairwise(edges)):
        begins = torch.arange(begin, end, size)
        parts.append({"begin": begins, "end": (begins + size).clamp(max=end), "slot": slot})
    return parts


def describe_slots(
    group: Group,
    table: RowTable,
    tables: SplitTables,
    chunks: Sequence[Columns],
    ranges: Sequence[Columns],
) -> Tensor:
    """struct SplitSlot of every slot."""
    rows, place, back, chunk, range_ = [], 0, 0, 0, 0
    for number, (source, slot) in enumerate(zip(group.sources, group.slots, strict=True)):
        own_chunks, own_ranges = len(chunks[number]["entry"]), len(ranges[number]["begin"])
        rows.append(
            {
                "bucket": source.offset - slot.offset,
                "begin": slot.offset,
                "end": slot.offset + slot.numel,
                "block": tables.blocks[number],
                "first": tables.firsts[number],
                "edge": tables.edges[number],
                "last": tables.edges[number + 1],
                "shift": tables.shifts[number],
                "start": place,
                "room": tables.rooms[number],
                "entry": table.entry_starts[number],
                "keep": table.rows[number].entries,
                "back_start": back,
                "back_room": tables.back[number],
                "winners": tables.winners[number],
                "chunk": chunk,
                "chunks": own_chunks,
                "range": range_,
                "ranges": own_ranges,
            }
        )
        place, back = place + tables.rooms[number], back + tables.back[number]
        chunk, range_ = chunk + own_chunks, range_ + own_ranges
    return make_rows(SplitSlot, rows)


def slots_of(rooms: Sequence[int], device: torch.device) -> Tensor:
    """int32: the slot of every place."""
    counts = torch.tensor(rooms)
    return torch.arange(len(rooms)).repeat_interleave(counts).to(device, torch.int32)
