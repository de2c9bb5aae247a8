"""The contract of an index code, and the codes that give every index of a row the same width."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.forms import Formed
from thinwire.layout import RowTable, SlotRows
from thinwire.wire.bits import WORD_BITS, pack, unpack, words_for

SHORT_LIMIT = 1 << 16


FIXED_WIDTH = "indices of 16 or 32 bits"
PACKED_BITS = "indices of as many bits as a row needs"
"""Forms of index codes; both have `slot_places`."""


class IndexCode(Formed, ABC):
    """Row-local indices -> bytes -> row-local indices, exactly."""

    computed_by = ("nbytes", "encode", "decode")

    name: str
    ordered: bool = False
    """Whether the entries of a row must come with indices that never fall; the codec then sorts them."""

    @abstractmethod
    def bits(self, rows: SlotRows) -> float:
        """Bits per entry for the rows of this slot."""

    @abstractmethod
    def nbytes(self, table: RowTable) -> int: ...

    @abstractmethod
    def encode(self, indices: Tensor, table: RowTable) -> Tensor:
        """uint8 [nbytes]."""

    @abstractmethod
    def decode(self, raw: Tensor, table: RowTable) -> Tensor:
        """int64 [entries]; not yet checked against the row lengths, -1 where the bytes mean nothing."""


@dataclass(frozen=True)
class FixedWidthCode(IndexCode):
    """32 bits each, or 16 for the slots whose rows are short enough if `short` is set."""

    name: str
    short: bool

    form = FIXED_WIDTH

    def _itemsize(self, rows: SlotRows) -> int:
        return 2 if self.short and rows.length <= SHORT_LIMIT else 4

    def bits(self, rows: SlotRows) -> float:
        return 8.0 * self._itemsize(rows)

    def _runs(self, table: RowTable) -> list[tuple[int, int, int]]:
        """(first entry, last entry, bytes per entry) of neighbouring slots that share a width."""
        runs: list[tuple[int, int, int]] = []
        for index, rows in enumerate(table.rows):
            start, stop, width = (
                table.entry_starts[index],
                table.entry_starts[index + 1],
                self._itemsize(rows),
            )
            if runs and runs[-1][2] == width:
                runs[-1] = (runs[-1][0], stop, width)
            else:
                runs.append((start, stop, width))
        # Wide entries first keeps every run aligned for a typed view of the bytes.
        return sorted(runs, key=lambda run: -run[2])

    def slot_places(self, table: RowTable) -> list[tuple[int, int]]:
        """(byte of its first index, bytes per index) of every slot."""
        return find_places(table, self._runs(table), lambda size: size)

    def nbytes(self, table: RowTable) -> int:
        return sum((stop - start) * width for start, stop, width in self._runs(table))

    def encode(self, indices: Tensor, table: RowTable) -> Tensor:
        parts = [
            # Casting to int16 wraps, which is the two-byte pattern wanted; decode masks it back.
            indices[start:stop].to(torch.int32 if width == 4 else torch.int16).view(torch.uint8)
            for start, stop, width in self._runs(table)
        ]
        return (
            torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8, device=indices.device)
        )

    def decode(self, raw: Tensor, table: RowTable) -> Tensor:
        indices = torch.empty(table.entries, dtype=torch.int64, device=raw.device)
        at = 0
        for start, stop, width in self._runs(table):
            piece = raw[at : at + (stop - start) * width]
            if width == 4:
                indices[start:stop] = piece.view(torch.int32)
            else:
                indices[start:stop] = piece.view(torch.int16).long() & 0xFFFF
            at += (stop - start) * width
        return indices


@dataclass(frozen=True)
class PackedCode(IndexCode):
    """ceil(log2 L) bits for each index of a row of length L, slots of equal width joined to one stream."""

    name: str

    form = PACKED_BITS

    def bits(self, rows: SlotRows) -> float:
        return float((rows.length - 1).bit_length())

    def _runs(self, table: RowTable) -> list[tuple[int, int, int]]:
        """(first entry, last entry, bits per entry) of neighbouring slots that share a width."""
        runs: list[tuple[int, int, int]] = []
        for index, rows in enumerate(table.rows):
            start, stop = table.entry_starts[index], table.entry_starts[index + 1]
            width = (rows.length - 1).bit_length()
            if runs and runs[-1][2] == width:
                runs[-1] = (runs[-1][0], stop, width)
            else:
                runs.append((start, stop, width))
        return runs

    def slot_places(self, table: RowTable) -> list[tuple[int, int]]:
        """(bit of its first index, bits per index) of every slot."""
        return find_places(table, self._runs(table), lambda size: WORD_BITS * words_for(size))

    def nbytes(self, table: RowTable) -> int:
        return sum(
            4 * words_for((stop - start) * width) for start, stop, width in self._runs(table)
        )

    def encode(self, indices: Tensor, table: RowTable) -> Tensor:
        parts = [pack(indices[start:stop], width) for start, stop, width in self._runs(table)]
        nothing = torch.zeros(0, dtype=torch.int32, device=indices.device)
        return torch.cat([nothing, *parts]).view(torch.uint8)

    def decode(self, raw: Tensor, table: RowTable) -> Tensor:
        words, at = raw.view(torch.int32), 0
        indices = torch.zeros(table.entries, dtype=torch.int64, device=raw.device)
        for start, stop, width in self._runs(table):
            size = words_for((stop - start) * width)
            indices[start:stop] = unpack(words[at : at + size], stop - start, width)
            at += size
        return indices


def find_places(
    table: RowTable, runs: Sequence[tuple[int, int, int]], room: Callable[[int], int]
) -> list[tuple[int, int]]:
    """(place of its first index, width) of every slot, if each run of (first entry, last entry, width) takes `room` of its size."""
    places, at = {}, 0
    for start, stop, width in runs:
        for index, first in enumerate(table.entry_starts[:-1]):
            if start <= first < stop:
                places[index] = (at + (first - start) * width, width)
        at += room((stop - start) * width)
    return [places[index] for index in range(len(table.rows))]
