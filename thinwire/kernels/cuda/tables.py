"""Tables that tell the kernels where every row of a group lies. They are made once per layout."""

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
from thinwire.kernels.cuda.multi_block_rows import MultiBlockLaunch, make_multi_block_launch
from thinwire.kernels.cuda.register_rows import (
    RegisterRows,
    launch_of,
    make_register_rows,
    register_shape,
)
from thinwire.kernels.cuda.rows import RowStream, aim_of, make_stream
from thinwire.kernels.cuda.structs import Row, make_table
from thinwire.kernels.cuda.tuning import Tuning
from thinwire.layout import Group, SlotRows
from thinwire.wire.codec import FIXED_WORDS, Codec
from thinwire.wire.fixed import FixedWidthCode, PackedCode
from thinwire.wire.floats import FloatCode

WHOLE = 5120
"""A whole tensor of more elements is shared by many blocks. If a group has one, all its whole tensors are, in the same launches."""
FEW_ROWS = 64
"""Strided rows of a slot may be shared by many blocks if they are fewer than this, which is fewer than a GPU's multiprocessors."""


@dataclass(frozen=True, eq=False)
class FusedTables:
    """Everything the kernels need to know about one codec on one group."""

    streamed_rows: RowStream | None
    register_rows: Sequence[RegisterRows]
    columns: ColumnLaunch | None
    multi_block_rows: MultiBlockLaunch | None
    all_rows: Tensor
    """struct Row, in the order of the codec's table"""
    template: Tensor
    """uint8: the payload's header without flags, then zeros."""
    expected: Tensor
    """int32: the header's fixed words and the places of each slot."""


def is_contiguous(rows: SlotRows) -> bool:
    return rows.stride == 1 or rows.length == 1


def needs_many_blocks(rows: SlotRows, tuning: Tuning) -> bool:
    """Whether many blocks share a row: no block has registers for it, or it is one of a few columns and too crowded for a block."""
    if is_contiguous(rows):
        return register_shape(rows.length) is None
    few = rows.count * rows.length >= tuning.few_columns_elements and rows.count < FEW_ROWS
    return few and candidates_of(rows) > (tuning.block_candidates or BLOCK_LIST)


def make_tables(group: Group, codec: Codec, tuning: Tuning) -> FusedTables:
    device = group.device
    described = describe_rows(group, codec)
    in_registers: dict[tuple[int, int], dict[tuple[int, int], list[Tensor]]] = {}
    streamed: list[tuple[SlotRows, Tensor]] = []
    columns: list[tuple[SlotRows, Tensor]] = []
    shared: list[tuple[SlotRows, Tensor]] = []
    cut_whole = any(rows.count == 1 and rows.length > WHOLE for rows in codec.table.rows)
    for rows, table in zip(codec.table.rows, described, strict=True):
        if needs_many_blocks(rows, tuning) or (cut_whole and rows.count == 1):
            shared.append((rows, table))
        elif not is_contiguous(rows):
            columns.append((rows, table))
        elif aim_of(rows):
            streamed.append((rows, table))
        else:
            shape = register_shape(rows.length)
            assert shape is not None
            in_registers.setdefault(launch_of(*shape), {}).setdefault(shape, []).append(table)
    header = codec.fixed_header()
    places = torch.tensor([rows.entries for rows in codec.table.rows], dtype=torch.int32)
    return FusedTables(
        streamed_rows=make_stream(streamed, device) if streamed else None,
        register_rows=[
            make_register_rows(warps, shapes, device) for (warps, _), shapes in in_registers.items()
        ],
        columns=make_column_launch(columns, tuning, device) if columns else None,
        multi_block_rows=make_multi_block_launch(shared, tuning, device) if shared else None,
        all_rows=torch.cat(described).to(device),
        template=blank_payload(codec).to(device),
        expected=torch.cat([header[:FIXED_WORDS], places]).to(device),
    )


def blank_payload(codec: Codec) -> Tensor:
    """uint8: the header without flags, then zeros."""
    header = codec.fixed_header().view(torch.uint8)
    return torch.cat([header, header.new_zeros(codec.nbytes - header.nbytes)])


def describe_rows(group: Group, codec: Codec) -> list[Tensor]:
    """struct Row of all rows of each slot."""
    assert isinstance(codec.values, FloatCode)
    item = codec.values.dtype.itemsize
    first_indices = index_places(codec)
    tables = []
    for index, (source, rows) in enumerate(zip(group.sources, codec.table.rows, strict=True)):
        offsets = rows.row_offsets()
        into_bucket = source.offset - rows.slot.offset
        entries = torch.arange(rows.count) * rows.keep
        first_index, width = first_indices[index]
        aligned = rows.stride == 1 and rows.length % 4 == 0
        quads = (offsets % 4 == 0).long() * int(aligned)
        tables.append(
            make_table(
                Row,
                gradient=offsets + into_bucket,
                memory=offsets,
                values=codec.values_at + (codec.table.entry_starts[index] + entries) * item,
                indices=first_index + entries * width,
                length=rows.length,
                keep=rows.keep,
                stride=rows.stride,
                slot=index,
                width=width,
                vector=quads * ((offsets + into_bucket) % 4 == 0),
                quads=quads,
                aim=aim_of(rows),
                entry=codec.table.entry_starts[index] + entries,
            )
        )
    return tables


def index_places(codec: Codec) -> list[tuple[int, int]]:
    """(byte of its first index in the payload, bytes per index) of every slot; bits where indices are packed."""
    assert isinstance(codec.indices, FixedWidthCode | PackedCode)
    start = codec.indices_at * (8 if isinstance(codec.indices, PackedCode) else 1)
    # Kernels read a word even where indices have no width. Such a place may be behind the payload's end, so it is the header.
    return [
        (start + first if width else 0, width)
        for first, width in codec.indices.slot_places(codec.table)
    ]
