"""The tables of rows that many blocks share (encode_giants.cu), and the buffers they work in; written once per layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import ExchangeError
from thinwire.select.rows import SlotRows

CHUNK = 4096
"""Elements that one block collects candidates from."""
CHUNKS_OF_GROUP = 32
"""Chunks that one block decides about."""
BINS = 1024
"""Of search.cuh."""
CHUNKS_OF_HISTOGRAM = 128
MOST_HISTOGRAMS = 16
"""Of a row: chunks that add to the same bins wait for each other."""
CANDIDATES_PER_ENTRY = 5
ELEMENTS_PER_CANDIDATE = 20
SPARE_CANDIDATES = 256
"""Room for the candidates of a row, by the larger of two counts; a row that has more is read twice."""
ENTRIES_PER_EDGE = 8
"""Room for those in the histogram's bin that decides; a row that has more is searched by one block."""


@dataclass(frozen=True, eq=False)
class GiantLaunch:
    """Rows too long for one block, with the buffers that their selection works in.

    Made once per layout. The buffers take 6 bytes per candidate, at most a twentieth of the elements (7.5 % of a float32 bucket)
    or, at densities above 1 %, five candidates per entry; 1 byte per entry beside them, 4 to 6 KB per row, as much again per 128 chunks of it (2 MB) and 56 bytes per chunk.
    """

    rows: Tensor
    chunks: Tensor
    """int64 [chunks, 5]: struct Chunk."""
    groups: Tensor
    """int32 [groups, 2]: struct Group."""
    giants: Tensor
    """int32 [rows, 16]: struct Giant."""
    sections: Tensor
    """int32 [chunks, 4]: struct Section."""
    histograms: Tensor
    """int32 [histograms, bins]: one or more of each row."""
    list_values: Tensor
    list_places: Tensor
    """int16: where each candidate is in its chunk."""
    edges: Tensor
    """int32 [edges, 2]: struct Edge."""


def make_giants(slots: Sequence[tuple[SlotRows, Tensor]], device: torch.device) -> GiantLaunch:
    """Chunks of every row, and room for its candidates."""
    chunks: list[Tensor] = []
    groups: list[Tensor] = []
    giants: list[list[int]] = []
    first, listed, edges, counted = 0, 0, 0, 0
    for rows, table in slots:
        room, edge_room = candidate_room(rows)
        for row in table:
            cut = cut_chunks(row, len(giants))
            heads = torch.arange(0, len(cut), CHUNKS_OF_GROUP, dtype=torch.int32)
            chunks.append(cut)
            groups.append(torch.stack([torch.full_like(heads, len(giants)), heads + first], 1))
            copies = histograms_of(len(cut))
            places = [listed, room, edges, edge_room, counted, copies]
            giants.append([first, len(cut), len(heads), *places, *[0] * 7])
            first, listed, edges = first + len(cut), listed + room, edges + edge_room
            counted += copies
    check_listed(listed)

    def room_for(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return GiantLaunch(
        rows=torch.cat([table for _, table in slots]).to(device),
        chunks=torch.cat(chunks).to(device),
        groups=torch.cat(groups).to(device),
        giants=torch.tensor(giants, dtype=torch.int32).to(device),
        sections=room_for(first, 4),
        histograms=room_for(counted, BINS),
        list_values=room_for(listed, dtype=torch.float32),
        list_places=room_for(listed, dtype=torch.int16),
        edges=room_for(edges, 2),
    )


def histograms_of(chunks: int) -> int:
    """How many a row of so many chunks has: a power of two."""
    wanted = -(-chunks // CHUNKS_OF_HISTOGRAM)
    return min(MOST_HISTOGRAMS, 1 << (wanted - 1).bit_length())


def check_listed(candidates: int) -> None:
    """Refuse lists whose places the kernels cannot count."""
    if candidates >= 1 << 31:
        raise ExchangeError(f"a bucket's candidates ({candidates}) do not fit 31-bit places")


def cut_chunks(row: Tensor, number: int) -> Tensor:
    """int64 [chunks, 5]: struct Chunk of one row, which is the `number`-th; `row` is its struct Row."""
    gradient, memory = (int(word) for word in row[:2])
    (length, _), (stride, slot), (_, lie) = (halves(word) for word in row[4:7])
    starts = torch.arange(0, length, CHUNK)
    words = [
        gradient + starts * stride,
        memory + starts * stride,
        number | starts << 32,
        (length - starts).clamp(max=CHUNK) | stride << 32,
        torch.full_like(starts, lie & 1 | slot << 32),
    ]
    return torch.stack(words, 1)


def halves(word: Tensor) -> tuple[int, int]:
    """The two 32-bit numbers of a word of a table."""
    return int(word) & 0xFFFFFFFF, int(word) >> 32


def candidate_room(rows: SlotRows) -> tuple[int, int]:
    """(candidates, those in the bin that decides) that there is room for."""
    usual = max(CANDIDATES_PER_ENTRY * rows.keep, rows.length // ELEMENTS_PER_CANDIDATE)
    room = min(rows.length, usual + SPARE_CANDIDATES)
    return room, min(room, rows.keep // ENTRIES_PER_EDGE + SPARE_CANDIDATES)
