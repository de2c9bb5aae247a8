"""Index codes: how the places of the chosen entries are written down."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.select.rows import RowTable, SlotRows

SHORT_LIMIT = 1 << 16


class IndexCode(ABC):
    """Row-local indices -> bytes -> row-local indices, exactly."""

    name: str

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
        """int64 [entries]; not yet checked against the row lengths."""


@dataclass(frozen=True)
class FixedWidthCode(IndexCode):
    """32 bits each, or 16 for the slots whose rows are short enough if `short` is set."""

    name: str
    short: bool

    def _itemsize(self, rows: SlotRows) -> int:
        return 2 if self.short and rows.length <= SHORT_LIMIT else 4

    def bits(self, rows: SlotRows) -> float:
        return 8.0 * self._itemsize(rows)

    def _runs(self, table: RowTable) -> list[tuple[int, int, int]]:
        """(first entry, last entry, bytes per entry) of neighbouring slots that share a width."""
        runs: list[tuple[int, int, int]] = []
        for which, rows in enumerate(table.rows):
            start, stop, width = (
                table.entry_starts[which],
                table.entry_starts[which + 1],
                self._itemsize(rows),
            )
            if runs and runs[-1][2] == width:
                runs[-1] = (runs[-1][0], stop, width)
            else:
                runs.append((start, stop, width))
        # Wide entries first keeps every run aligned for a typed view of the bytes.
        return sorted(runs, key=lambda run: -run[2])

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


INDEX_CODES: dict[str, IndexCode] = {
    "int32": FixedWidthCode("int32", short=False),
    "auto": FixedWidthCode("auto", short=True),
}
