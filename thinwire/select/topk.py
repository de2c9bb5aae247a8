"""Traditional and all-dimension top-k: the exact selections.

Ming et al., "ADTopk: All-Dimension Top-k Compression for High-Performance Data-Parallel DNN Training" (HPDC'24).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from thinwire.kernels.exact_topk import exact_topk
from thinwire.kernels.topk import row_topk
from thinwire.layout import (
    WHOLE_TENSOR,
    Axis,
    RowTable,
    Slot,
    SlotRows,
    resolve_axis,
    rows_along,
    rows_in_chunks,
)
from thinwire.select.base import LARGEST_OF_ROWS, Picks, Selector, SlotPicks
from thinwire.validate import check_axis, check_density, check_positive_int


class ExactTopK(Selector):
    """The `keep` largest magnitudes of every row, ties to the lowest index."""

    form = LARGEST_OF_ROWS
    takes_largest = True

    def pick(self, c: Tensor, table: RowTable) -> Picks:
        indices, values = exact_topk(c, table)
        return Picks(values, indices)

    def pick_slot(self, c: Tensor, rows: SlotRows) -> SlotPicks:
        return SlotPicks(row_topk(rows.matrix(c), rows.keep))


@dataclass(frozen=True)
class TradTopK(ExactTopK):
    """Top-k over the whole tensor: k = max(1, floor(n x density))."""

    density: float
    """Fraction of the entries kept."""

    def __post_init__(self) -> None:
        check_density("density", self.density)

    def rows(self, slot: Slot, mode: Hashable = None) -> SlotRows:
        return rows_along(slot, WHOLE_TENSOR, self.density)


@dataclass(frozen=True)
class AllDimensionTopK(ExactTopK):
    """Top-k inside every fibre of one axis, so that every dimension contributes.

    1. Cut the tensor into fibres along `axis` ("auto": by the kind of layer, "published": axis 1).
    2. In each fibre of length L keep k = max(1, floor(L x density)).
    """

    density: float
    """Fraction of the entries kept."""
    axis: Axis = "auto"
    """"auto" chooses by the kind of layer, "published" takes axis 1 always, a number names the axis."""

    def __post_init__(self) -> None:
        check_density("density", self.density)
        check_axis("axis", self.axis)

    def rows(self, slot: Slot, mode: Hashable = None) -> SlotRows:
        return rows_along(slot, resolve_axis(slot, self.axis), self.density)


@dataclass(frozen=True)
class ChunkwiseTopK(ExactTopK):
    """Top-k inside every chunk of a tensor, in memory order, as DeMo and SparseLoCo select: indices stay short.

    1. Cut the tensor into equal chunks: the longest that divide it, of at most `chunk` and more than a quarter of that.
       A tensor that has no such divisor is one chunk.
    2. In each chunk of length L keep k = max(1, floor(L x density)).
    """

    density: float
    """Fraction of the entries kept."""
    chunk: int = 4096
    """Elements of a chunk at most."""

    def __post_init__(self) -> None:
        check_density("density", self.density)
        check_positive_int("chunk", self.chunk)

    def rows(self, slot: Slot, mode: Hashable = None) -> SlotRows:
        return rows_in_chunks(slot, self.chunk, self.density)
