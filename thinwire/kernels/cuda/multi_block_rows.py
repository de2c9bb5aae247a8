"""Tables of rows that many blocks share (encode_multi_block_rows.cu), and the buffers of their selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.cuda.chunks import BINS, CHUNK_ROOM, Section, cut_chunks, make_lists
from thinwire.kernels.cuda.chunks import DEFINES as CHUNK_DEFINES
from thinwire.kernels.cuda.source import Defines
from thinwire.kernels.cuda.structs import (
    declare,
    i32,
    layout_of,
    make_room,
    make_rows,
    make_table,
)
from thinwire.kernels.cuda.tuning import Tuning
from thinwire.layout import SlotRows

GROUP_CHUNKS = BINS // 32
"""Chunks that one block decides about: one per warp."""
MOST_HISTOGRAMS = 16
"""Of a row."""
CANDIDATES_PER_ENTRY = 5
ELEMENTS_PER_CANDIDATE = 20
SPARE_CANDIDATES = 256
"""Room for the candidates of a row, by the larger of two counts. A row that has more is read twice."""
ChunkGroup = declare("ChunkGroup", (i32, "row first"))
"""multi_block_rows.cuh: chunks that one block decides about."""
RowState = declare(
    "RowState",
    (i32, "first chunks groups list room edge edge_room histogram copies"),
    (i32, "cut listed relisted edges done low way"),
)
"""multi_block_rows.cuh. Python sets the first line of fields, the kernels keep the second."""
Edge = declare("Edge", (i32, "bits chunk"))
"""multi_block_rows.cuh: a candidate in the deciding bin."""
DEFINES: Defines = (
    *CHUNK_DEFINES,
    ("GROUP_CHUNKS", GROUP_CHUNKS),
    *map(layout_of, (ChunkGroup, RowState, Edge)),
)


@dataclass(frozen=True, eq=False)
class MultiBlockLaunch:
    """Rows too long for one block, with the buffers that their selection works in.

    The buffers take 6 bytes per candidate. Candidates are a twentieth of the elements at most, or five per entry at densities above
    1 %. Beside them there is 1 byte per entry, 4 to 6 KB per row and as much again per 128 chunks of it, and 56 bytes per chunk.
    """

    rows: Tensor
    """struct Row"""
    chunks: Tensor
    """struct Chunk"""
    groups: Tensor
    """struct ChunkGroup"""
    row_states: Tensor
    """struct RowState"""
    sections: Tensor
    """struct Section, one per chunk"""
    histograms: Tensor
    """int32 [histograms, bins]: one or more of each row."""
    list_values: Tensor
    list_places: Tensor
    """int16: where each candidate is in its chunk."""
    edges: Tensor
    """struct Edge"""


def make_multi_block_launch(
    slots: Sequence[tuple[SlotRows, Tensor]], tuning: Tuning, device: torch.device
) -> MultiBlockLaunch:
    """`slots` come with their rows as `describe_rows` gives them."""
    chunks: list[Tensor] = []
    groups: list[Tensor] = []
    states: list[dict[str, int]] = []
    first, listed, edges, counted = 0, 0, 0, 0
    for rows, table in slots:
        room, edge_room = candidate_room(rows, tuning)
        for row in table.split(1):
            cut = cut_chunks(row, len(states), tuning.chunk_elements or CHUNK_ROOM)
            heads = torch.arange(0, len(cut), GROUP_CHUNKS)
            chunks.append(cut)
            groups.append(make_table(ChunkGroup, row=len(states), first=first + heads))
            copies = histograms_of(len(cut), tuning)
            states.append(
                {
                    "first": first,
                    "chunks": len(cut),
                    "groups": len(heads),
                    "list": listed,
                    "room": room,
                    "edge": edges,
                    "edge_room": edge_room,
                    "histogram": counted,
                    "copies": copies,
                }
            )
            first, listed, edges = first + len(cut), listed + room, edges + edge_room
            counted += copies
    list_values, list_places = make_lists(listed, device)
    return MultiBlockLaunch(
        rows=torch.cat([table for _, table in slots]).to(device),
        chunks=torch.cat(chunks).to(device),
        groups=torch.cat(groups).to(device),
        row_states=make_rows(RowState, states).to(device),
        sections=make_room(Section, first, device),
        histograms=torch.zeros(counted, BINS, dtype=torch.int32, device=device),
        list_values=list_values,
        list_places=list_places,
        edges=make_room(Edge, edges, device),
    )


def histograms_of(chunks: int, tuning: Tuning) -> int:
    """How many a row of so many chunks has: a power of two."""
    wanted = -(-chunks // tuning.histogram_chunks)
    return min(MOST_HISTOGRAMS, 1 << (wanted - 1).bit_length())


def candidate_room(rows: SlotRows, tuning: Tuning) -> tuple[int, int]:
    """(candidates, those in the bin that decides) that there is room for."""
    usual = max(CANDIDATES_PER_ENTRY * rows.keep, rows.length // ELEMENTS_PER_CANDIDATE)
    room = min(rows.length, usual + SPARE_CANDIDATES)
    return room, min(room, rows.keep // tuning.entries_per_edge + SPARE_CANDIDATES)
