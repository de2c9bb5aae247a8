"""Chunks: runs of neighbouring elements that are sent or held back as a whole.

Sun et al., "Optimizing Network Performance for Distributed DNN Training on GPU Clusters: ImageNet/AlexNet Training
in 1.5 Minutes" (2019).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from thinwire.kernels.exact_topk import exact_topk
from thinwire.layout import RowTable, Slot, SlotRows, keep_count, remembered
from thinwire.select.base import WHOLE_CHUNKS, Picks, Selector, picks_at, picks_of
from thinwire.validate import check_density, check_positive_int


@dataclass(frozen=True)
class ChunkRows(SlotRows):
    """One row = one tensor, cut into runs of `chunk` elements (the last may be shorter)."""

    chunk: int

    @property
    def chunks(self) -> int:
        return -(-self.length // self.chunk)

    @property
    def chosen(self) -> int:
        """How many chunks the places have room for."""
        return min(self.chunks, -(-self.keep // self.chunk))

    @property
    def cut_keep(self) -> int:
        """How many entries there are if the last chunk of the tensor is among the chosen."""
        missing = self.chunks * self.chunk - self.length
        return min(self.keep, self.chosen * self.chunk - missing)


@dataclass(frozen=True)
class ChunkChoice(Selector):
    """The chunks with the largest L1 norm: max(1, floor(density x chunks)) of each tensor.

    Chunks are cut per tensor, as equal as possible and at most `chunk` long. Alone it takes this rank's norms; the
    chunk exchange takes norms summed over ranks, and then no indices have to travel.
    """

    density: float
    """Fraction of the entries kept."""
    chunk: int = 256
    """Elements of a chunk, at most."""

    form = WHOLE_CHUNKS
    has_exact_count = False
    in_chunks = True

    def __post_init__(self) -> None:
        check_density("density", self.density)
        check_positive_int("chunk", self.chunk)

    def rows(self, slot: Slot, mode: Hashable = None) -> SlotRows:
        chunk = -(-slot.numel // -(-slot.numel // self.chunk))
        chosen = keep_count(-(-slot.numel // chunk), self.density)
        keep = min(slot.numel, chosen * chunk)
        return ChunkRows(slot, (), (), slot.numel, 1, keep, f"chunks of {chunk}", chunk)

    def pick(self, c: Tensor, table: RowTable) -> Picks:
        chunks = chunks_of(table, c.device)
        return chunks.pick(c, chunks.norms(c))


def chunk_rows(rows: SlotRows) -> ChunkRows:
    assert isinstance(rows, ChunkRows)
    return rows


def chunks_of(table: RowTable, device: torch.device) -> TableChunks:
    """The chunks of a table's slots, cut once."""
    return remembered(table, ("chunks", device), lambda: TableChunks(table, device))


class TableChunks:
    """The chunks of all slots of a table, one slot after the other."""

    def __init__(self, table: RowTable, device: torch.device) -> None:
        self.table = table
        self._slots = slots = [chunk_rows(rows) for rows in table.rows]
        self._stretches = cut_stretches(slots)
        self._even = all(rows.length % rows.chunk == 0 for rows in slots)
        starts = list(accumulate((rows.chunks for rows in slots), initial=0))
        self._norm_rows = RowTable(
            [norm_row(rows, start) for rows, start in zip(slots, starts[:-1], strict=True)],
            starts[-1],
        )
        # Of every entry: its chunk among the chosen ones, the length of such a chunk, and its place there.
        firsts = list(accumulate((rows.chosen for rows in slots), initial=0))
        pairs = list(zip(slots, firsts[:-1], strict=True))
        places = [torch.arange(rows.keep) for rows in slots]
        self._chosen = on(
            device,
            [first + p // rows.chunk for (rows, first), p in zip(pairs, places, strict=True)],
        )
        self._inside = on(device, [p % rows.chunk for rows, p in zip(slots, places, strict=True)])
        self._chunk = on(device, [torch.full((rows.keep,), rows.chunk) for rows in slots])
        # Of every slot: its last chosen chunk, the last of all, and how many entries it has without and with that one.
        self._last = on(device, [torch.tensor([first + rows.chosen - 1]) for rows, first in pairs])
        self._end = on(device, [torch.tensor([rows.chunks - 1]) for rows in slots])
        self._full = on(device, [torch.tensor([rows.keep]) for rows in slots]).int()
        self._cut = on(device, [torch.tensor([rows.cut_keep]) for rows in slots]).int()

    def norms(self, c: Tensor) -> Tensor:
        """[chunks]: the sum of magnitudes of each."""
        if not self._stretches:
            return c[:0]
        parts = [torch.linalg.vector_norm(one.matrix(c), 1, dim=1) for one in self._stretches]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def choose(self, norms: Tensor) -> tuple[Tensor, Tensor | None]:
        """(indices of all elements of the chunks of each slot that have the largest norms, ties to the lowest; int32 [slots]: how many
        of a slot's places that takes, None = all). Places left over are at index 0."""
        best, _ = exact_topk(norms, self._norm_rows)
        indices = best[self._chosen] * self._chunk + self._inside
        if self._even:
            return indices, None
        # Ascending, so that what lies beyond a tensor's end is at the end. It has no place in c.
        counts = torch.where(best[self._last] == self._end, self._cut, self._full)
        within = indices < self.table.row_lengths(norms.device)
        return torch.where(within, indices, 0), counts

    def pick(self, c: Tensor, norms: Tensor) -> Picks:
        """The same with the values of `c` there."""
        indices, counts = self.choose(norms)
        if counts is None:
            return replace(picks_at(c, self.table, indices), counts=self._full)
        return picks_of(c, self.table, indices, counts)


def on(device: torch.device, parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([*parts, torch.zeros(0, dtype=torch.int64)]).to(device)


def norm_row(rows: ChunkRows, start: int) -> SlotRows:
    """A slot's norms as one row, which begins at `start`."""
    return SlotRows(rows.slot.at(start), (), (), rows.chunks, 1, rows.chosen, "norms")


@dataclass(frozen=True)
class Stretch:
    """Neighbouring chunks of one length in a group's buffer."""

    offset: int
    count: int
    chunk: int

    @property
    def end(self) -> int:
        return self.offset + self.count * self.chunk

    def matrix(self, flat: Tensor) -> Tensor:
        """[count, chunk]"""
        return flat[self.offset : self.end].view(self.count, self.chunk)


def cut_stretches(slots: Sequence[ChunkRows]) -> list[Stretch]:
    """All chunks, in order. Slots without a gap between them are one stretch, if their chunks are as long."""
    made: list[Stretch] = []
    for rows in slots:
        whole, rest = divmod(rows.length, rows.chunk)
        parts = [Stretch(rows.slot.offset, whole, rows.chunk)] if whole else []
        if rest:
            parts.append(Stretch(rows.slot.offset + whole * rows.chunk, 1, rest))
        for part in parts:
            last = made[-1] if made else None
            if last is not None and last.chunk == part.chunk and last.end == part.offset:
                made[-1] = Stretch(last.offset, last.count + part.count, last.chunk)
            else:
                made.append(part)
    return made
