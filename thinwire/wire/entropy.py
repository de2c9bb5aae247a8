"""The entropy-near index code: each shape of row gets the coder with the smallest guaranteed size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.layout import RowTable, SlotRows
from thinwire.wire.coders import RowCoder, choose_coder
from thinwire.wire.fixed import IndexCode


@dataclass(frozen=True, eq=False)
class Section:
    """All rows of one shape in a table, whichever slots they are in."""

    coder: RowCoder
    rows: int
    entries: Tensor
    """int64 [rows x keep] on the CPU: which entries of the table these are"""
    on_device: dict[torch.device, Tensor]

    def entries_on(self, device: torch.device) -> Tensor:
        if device not in self.on_device:
            self.on_device[device] = self.entries.to(device)
        return self.on_device[device]

    @property
    def words(self) -> int:
        return self.coder.words(self.rows)


_known: WeakKeyDictionary[RowTable, list[Section]] = WeakKeyDictionary()


def cut_sections(table: RowTable) -> list[Section]:
    """The table's rows by shape, remembered as long as the table lives."""
    if table not in _known:
        entries: dict[tuple[int, int], list[Tensor]] = {}
        for index, rows in enumerate(table.rows):
            if rows.entries:
                span = torch.arange(table.entry_starts[index], table.entry_starts[index + 1])
                entries.setdefault((rows.length, rows.keep), []).append(span)
        _known[table] = [
            Section(choose_coder(*shape), sum(map(len, spans)) // shape[1], torch.cat(spans), {})
            for shape, spans in entries.items()
        ]
    return _known[table]


@dataclass(frozen=True)
class EntropyCode(IndexCode):
    """Rice run lengths, enumeration or a bitmap by the shape of the rows; one section of words per shape.

    Lossless, so joining rows of several slots leaves the result the same in any bucket.
    """

    name: str
    """As the wire format calls it."""
    ordered = True

    def bits(self, rows: SlotRows) -> float:
        return choose_coder(rows.length, rows.keep).row_bits() / rows.keep

    def nbytes(self, table: RowTable) -> int:
        return 4 * sum(section.words for section in cut_sections(table))

    def _matrices(self, indices: Tensor, table: RowTable) -> Iterator[tuple[Section, Tensor]]:
        for section in cut_sections(table):
            matrix = indices[section.entries_on(indices.device)]
            yield section, matrix.view(section.rows, -1)

    def encode(self, indices: Tensor, table: RowTable) -> Tensor:
        parts = [section.coder.encode(matrix) for section, matrix in self._matrices(indices, table)]
        nothing = torch.zeros(0, dtype=torch.int32, device=indices.device)
        return torch.cat([nothing, *parts]).view(torch.uint8)

    def decode(self, raw: Tensor, table: RowTable) -> Tensor:
        words, at = raw.view(torch.int32), 0
        indices = torch.empty(table.entries, dtype=torch.int64, device=raw.device)
        for section in cut_sections(table):
            matrix = section.coder.decode(words[at : at + section.words], section.rows)
            indices[section.entries_on(raw.device)] = matrix.view(-1)
            at += section.words
        return indices

    def used_bits(self, indices: Tensor, table: RowTable) -> int:
        """Bits these indices need without the reserve for the worst case; a measurement, made on the host."""
        return sum(section.coder.used_bits(m) for section, m in self._matrices(indices, table))
