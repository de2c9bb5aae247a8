"""Chunks: runs of neighbouring elements that are sent or held back as a whole.

Sun et al., "Optimizing Network Performance for Distributed DNN Training on GPU Clusters: ImageNet/AlexNet Training
in 1.5 Minutes" (2019).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.topk import row_topk
from thinwire.layout import RowTable, Slot, SlotRows, keep_count
from thinwire.select.base import Picks, Selector, picks_of
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

    def norms(self, flat: Tensor) -> Tensor:
        """Sum of magnitudes of every chunk."""
        padded = torch.zeros(self.chunks * self.chunk, dtype=flat.dtype, device=flat.device)
        padded[: self.length] = self.matrix(flat)
        return padded.view(self.chunks, self.chunk).abs().sum(1)

    def elements(self, norms: Tensor) -> tuple[Tensor, Tensor]:
        """(indices [keep] of the chunks with the largest norms, unused ones last; how many are used)."""
        best = row_topk(norms, self.chosen)
        inside = torch.arange(self.chunk, device=norms.device)
        indices = (best[:, None] * self.chunk + inside).reshape(-1)[: self.keep]
        # Ascending, so what lies beyond the tensor's end is at the end.
        used = (indices < self.length).sum()
        return torch.where(indices < self.length, indices, 0), used


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
        return pick_chunks(c, table, [chunk_rows(rows).norms(c) for rows in table.rows])


def chunk_rows(rows: SlotRows) -> ChunkRows:
    assert isinstance(rows, ChunkRows)
    return rows


def pick_chunks(c: Tensor, table: RowTable, norms: list[Tensor]) -> Picks:
    """All elements of the chunks that the norms choose."""
    chosen = [chunk_rows(rows).elements(norm) for rows, norm in zip(table.rows, norms, strict=True)]
    if not chosen:
        none = torch.zeros(0, dtype=torch.int64, device=c.device)
        return Picks(c[:0], none, none.int())
    indices = torch.cat([places for places, _ in chosen])
    return picks_of(c, table, indices, torch.stack([count for _, count in chosen]))
