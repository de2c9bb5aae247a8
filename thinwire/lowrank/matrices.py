"""Matrices: a parameter seen as one or several matrices inside a flat buffer, without copying it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.layout import Slot, SlotKind


@dataclass(frozen=True)
class Matrices:
    """`count` matrices of `rows` x `columns`.

    Columns lie in memory order, which for channels_last differs from the logical order; a low-rank approximation
    does not care, and `to_logical` gives a factor of columns the order it is saved in.
    """

    count: int
    rows: int
    columns: int
    strides: tuple[int, int, int]
    """Elements between matrices, rows and columns."""
    column_shape: tuple[int, ...]
    """The dimensions merged into columns, in logical order."""
    memory_order: tuple[int, ...]
    """The same dimensions, as places in `column_shape`, from outermost to innermost in memory."""

    def rank(self, wanted: int) -> int:
        return min(wanted, self.rows, self.columns)

    def side(self, side: str) -> int:
        """How long a column of factor "p" or "q" is."""
        return self.rows if side == "p" else self.columns

    def to_logical(self, factor: Tensor) -> Tensor:
        """[count, columns, r] from memory order to logical order."""
        stored = [self.column_shape[dim] for dim in self.memory_order]
        back = sorted(range(len(stored)), key=lambda place: self.memory_order[place])
        return self._permute(factor, stored, back)

    def to_memory(self, factor: Tensor) -> Tensor:
        """[count, columns, r] from logical order to memory order."""
        return self._permute(factor, self.column_shape, self.memory_order)

    def _permute(self, factor: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
        last = len(sizes) + 1
        spread = factor.reshape(self.count, *sizes, factor.shape[-1])
        return spread.permute(0, *(1 + dim for dim in order), last).reshape(factor.shape)


def matrices_of(slot: Slot) -> Matrices | None:
    """Dimension 0 x the rest; a 3-D weight that is no convolution (experts, stacked layers) is a batch of matrices.

    None where no such view exists: fewer than two dimensions, nothing inside, or a dimension 0 that lies between
    the others in memory.
    """
    if len(slot.shape) < 2 or not slot.numel:
        return None
    first = 1 if len(slot.shape) == 3 and slot.kind is SlotKind.OTHER else 0
    rest = range(first + 1, len(slot.shape))
    merged = _merge(slot, rest)
    if merged is None:
        return None
    stride, order = merged
    return Matrices(
        count=slot.shape[0] if first else 1,
        rows=slot.shape[first],
        columns=math.prod(slot.shape[dim] for dim in rest),
        strides=(slot.strides[0] if first else slot.numel, slot.strides[first], stride),
        column_shape=tuple(slot.shape[dim] for dim in rest),
        memory_order=tuple(dim - first - 1 for dim in order),
    )


def _merge(slot: Slot, dims: Sequence[int]) -> tuple[int, list[int]] | None:
    """(the one stride, the dimensions from outermost to innermost) if they can be walked as one."""
    wide = [dim for dim in dims if slot.shape[dim] > 1]
    narrow = [dim for dim in dims if slot.shape[dim] <= 1]
    wide.sort(key=lambda dim: -slot.strides[dim])
    for outer, inner in itertools.pairwise(wide):
        if slot.strides[outer] != slot.strides[inner] * slot.shape[inner]:
            return None
    return (slot.strides[wide[-1]] if wide else 1), [*narrow, *wide]
