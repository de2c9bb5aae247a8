"""The tables that tell the CUDA kernels where every row of a group lies; written once per layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.cuda.columns import (
    BLOCK_LIST,
    ColumnLaunch,
    candidates_of,
    make_column_launch,
)
from thinwire.kernels.cuda.giants import GiantLaunch, make_giants
from thinwire.kernels.cuda.rows import RowStream, aim_of, make_stream
from thinwire.plan.groups import Group
from thinwire.select.rows import SlotRows
from thinwire.wire.codec import FIXED_WORDS, Codec
from thinwire.wire.fixed import FixedWidthCode, PackedCode
from thinwire.wire.floats import FloatCode

WARP = 32
TEAMS = (1, 4, 8, 16)
"""Warps per row. Two wait for each other as often as four do and have twice the registers to fill: slower for every length tried."""
SHORT_ROWS = 4
"""Rows of one warp in a block."""
TEAM_SHAPES = 16
"""Where the bits of rows of several warps begin in SHAPES."""
MAX_ELEMENTS = 40
"""Elements of a row per lane: what fits in registers beside the search."""
MOST_ELEMENTS = 64
"""The same for the longest rows, which have no more warps to spread over."""
WHOLE = 5120
"""A whole tensor of more elements is cut into chunks: many blocks share it. Then all whole tensors are: they share its launches."""
GIANT = 1 << 18
FEW_ROWS = 64
"""Strided rows of a slot of that many elements, if these are fewer than a GPU has processors, may be cut into chunks."""


@dataclass(frozen=True, eq=False)
class RowLaunch:
    """Contiguous rows whose blocks have the same number of threads."""

    team: int
    """Warps of a block; a long row has all of them, short rows have one each."""
    shapes: int
    """SHAPES of encode_rows.cu."""
    rows: Tensor
    parts: Tensor
    """int32 [blocks, 3]: struct Part of encode_rows.cu."""
    guesses: Tensor
    """int32 [rows]: where the search of each row starts; only speed depends on it."""


@dataclass(frozen=True, eq=False)
class Tables:
    """Everything the kernels need to know about one codec on one group."""

    stream_rows: RowStream | None
    encode_rows: Sequence[RowLaunch]
    encode_columns: ColumnLaunch | None
    encode_giants: GiantLaunch | None
    all_rows: Tensor
    template: Tensor
    """uint8: the payload's header without flags, then zeros."""
    expected: Tensor
    """int32: the header's fixed words and the places of each slot."""


def is_contiguous(rows: SlotRows) -> bool:
    return rows.stride == 1 or rows.length == 1


def register_shape(length: int) -> tuple[int, int] | None:
    """(warps, elements per lane) of the fewest warps that hold a row, None if it is too long."""
    for warps in TEAMS:
        elements = -(-length // (4 * WARP * warps)) * 4
        if elements <= (MAX_ELEMENTS if warps < TEAMS[-1] else MOST_ELEMENTS):
            return warps, elements
    return None


def is_giant(rows: SlotRows) -> bool:
    """Whether many blocks share a row: it fits the registers of none, or has few others beside it and more candidates than a block lists."""
    if is_contiguous(rows):
        return register_shape(rows.length) is None
    few = rows.count * rows.length >= GIANT and rows.count < FEW_ROWS
    return few and candidates_of(rows) > BLOCK_LIST


def make_tables(group: Group, codec: Codec) -> Tables:
    device = group.device
    described = describe_rows(group, codec)
    by_team: dict[tuple[int, int], dict[tuple[int, int], list[Tensor]]] = {}
    streamed: list[tuple[SlotRows, Tensor]] = []
    columns: list[tuple[SlotRows, Tensor]] = []
    giants: list[tuple[SlotRows, Tensor]] = []
    cut_whole = any(rows.count == 1 and rows.length > WHOLE for rows in codec.table.rows)
    for rows, table in zip(codec.table.rows, described, strict=True):
        if is_giant(rows) or (cut_whole and rows.count == 1):
            giants.append((rows, table))
        elif is_contiguous(rows) and aim_of(rows):
            streamed.append((rows, table))
        elif is_contiguous(rows):
            shape = register_shape(rows.length)
            assert shape is not None
            by_team.setdefault(launch_of(*shape), {}).setdefault(shape, []).append(table)
        else:
            columns.append((rows, table))
    header = codec.fixed_header()
    places = torch.tensor([rows.entries for rows in codec.table.rows], dtype=torch.int32)
    return Tables(
        stream_rows=make_stream(streamed, device) if streamed else None,
        encode_rows=[
            make_row_launch(team, shapes, device) for (team, _), shapes in by_team.items()
        ],
        encode_columns=make_column_launch(columns, device) if columns else None,
        encode_giants=make_giants(giants, device) if giants else None,
        all_rows=torch.cat(described).to(device),
        template=blank_payload(codec).to(device),
        expected=torch.cat([header[:FIXED_WORDS], places]).to(device),
    )


def blank_payload(codec: Codec) -> Tensor:
    """uint8: the header without flags, then zeros."""
    header = codec.fixed_header().view(torch.uint8)
    return torch.cat([header, header.new_zeros(codec.nbytes - header.nbytes)])


def launch_of(warps: int, elements: int) -> tuple[int, int]:
    """(warps of a block, elements per lane where a shape has its launch to itself, or 0).

    Very long rows fill launches of their own, and several shapes of them take long to compile.
    """
    return (SHORT_ROWS, 0) if warps <= SHORT_ROWS else (warps, elements)


def shape_bit(warps: int, elements: int) -> int:
    """Which bit of SHAPES stands for rows of this shape."""
    return elements // 4 - 1 + (0 if warps == 1 else TEAM_SHAPES)


def make_row_launch(
    team: int, shapes: dict[tuple[int, int], list[Tensor]], device: torch.device
) -> RowLaunch:
    """The rows with the most to do first, so that no block of theirs is the last to begin."""
    tables: list[Tensor] = []
    parts: list[Tensor] = []
    first, bits = 0, 0
    for (warps, elements), mine in sorted(shapes.items(), key=lambda item: -item[0][1]):
        bit = shape_bit(warps, elements)
        bits |= 1 << bit
        count, each = sum(map(len, mine)), team if warps == 1 else 1
        starts = torch.arange(0, count, each, dtype=torch.int32)
        parts.append(
            torch.stack(
                [torch.full_like(starts, bit), first + starts, (count - starts).clamp(max=each)], 1
            )
        )
        tables += mine
        first += count
    return RowLaunch(
        team,
        bits,
        torch.cat(tables).to(device),
        torch.cat(parts).to(device),
        torch.zeros(first, dtype=torch.int32, device=device),
    )


def describe_rows(group: Group, codec: Codec) -> list[Tensor]:
    """int64 [rows, 8] for each slot: struct Row of common.cuh, two 32-bit numbers to a word."""
    assert isinstance(codec.values, FloatCode)
    item = codec.values.dtype.itemsize
    first_indices = index_places(codec)
    tables = []
    for which, (source, rows) in enumerate(zip(group.sources, codec.table.rows, strict=True)):
        offsets = rows.row_offsets()
        into_bucket = source.offset - rows.slot.offset
        numbers = torch.arange(rows.count)
        first_index, width = first_indices[which]
        aligned = rows.stride == 1 and rows.length % 4 == 0
        quads = (offsets % 4 == 0).long() * int(aligned)
        vector = quads * ((offsets + into_bucket) % 4 == 0)
        columns = [
            offsets + into_bucket,
            offsets,
            codec.values_at + (codec.table.entry_starts[which] + numbers * rows.keep) * item,
            first_index + numbers * rows.keep * width,
            torch.full((rows.count,), rows.length | rows.keep << 32),
            torch.full((rows.count,), rows.stride | which << 32),
            width | vector << 32 | quads << 48,
            aim_of(rows) | (codec.table.entry_starts[which] + numbers * rows.keep) << 32,
        ]
        tables.append(torch.stack(columns, 1))
    return tables


def index_places(codec: Codec) -> list[tuple[int, int]]:
    """(byte of its first index in the payload, bytes per index) of every slot; bits where indices are packed."""
    assert isinstance(codec.indices, FixedWidthCode | PackedCode)
    start = codec.indices_at * (8 if isinstance(codec.indices, PackedCode) else 1)
    # Kernels also look where indices have no width, which may be behind the end of the payload: there it is the header.
    return [
        (start + first if width else 0, width)
        for first, width in codec.indices.slot_places(codec.table)
    ]
