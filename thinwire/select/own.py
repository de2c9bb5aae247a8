"""Own: a selection made from a function."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.layout import WHOLE_TENSOR, Axis, RowTable, Slot, SlotRows, resolve_axis, rows_along
from thinwire.select.base import Picks, Selector, concatenate, picks_at
from thinwire.validate import check_axis, check_density

Choose = Callable[[Tensor, int], Tensor]
"""(rows [count, length], k) -> int64 [count, k]: which entries of every row are sent."""


@dataclass(frozen=True, repr=False)
class OwnSelection(Selector):
    """What a function chooses, row by row: k = max(1, floor(length x density)) entries of each."""

    function: Choose
    """(rows [count, length], k) -> int64 [count, k], no index twice in a row."""
    density: float
    """Fraction of the entries kept."""
    axis: Axis | None = None
    """Rows are the fibres of this axis, as in tw.ADTopK; None = the whole tensor is one row."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise UsageError(
                f"function is {self.function!r}; it must be a function of (rows, k) that returns indices"
            )
        check_density("density", self.density)
        if self.axis is not None:
            check_axis("axis", self.axis)

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __repr__(self) -> str:
        """The same on all ranks, which compare it: no address of the function."""
        module = getattr(self.function, "__module__", "")
        return f"selector({module}:{self.name}, density={self.density!r}, axis={self.axis!r})"

    def rows(self, slot: Slot, mode: Hashable = None) -> SlotRows:
        axis = WHOLE_TENSOR if self.axis is None else resolve_axis(slot, self.axis)
        return rows_along(slot, axis, self.density)

    def pick(self, c: Tensor, table: RowTable) -> Picks:
        chosen = [self._choose(c, rows) for rows in table.rows]
        return picks_at(c, table, concatenate(chosen, c.device))

    def _choose(self, c: Tensor, rows: SlotRows) -> Tensor:
        indices = self.function(rows.matrix(c).reshape(rows.count, rows.length), rows.keep)
        wanted = (rows.count, rows.keep)
        if not isinstance(indices, Tensor) or indices.dtype != torch.int64:
            kind = getattr(indices, "dtype", type(indices).__name__)
            raise UsageError(f"{self.name} returned {kind}; it must return a tensor of int64")
        if tuple(indices.shape) != wanted:
            raise UsageError(
                f"{self.name} returned indices of shape {list(indices.shape)} for {rows.slot.name!r}; it must be "
                f"{list(wanted)}, k of every row"
            )
        return indices


def selector(function: Choose, *, density: float, axis: Axis | None = None) -> Selector:
    """A selection from a function, for `tw.Compose(select=...)`.

    Args:
        function: Called with `rows`, float [count, length], and `k`; returns the indices of k entries of every row, int64
            [count, k]; no index may come twice in a row.
            Rows hold gradient plus what was held back before. It may be called in any
            order of parameters and must leave torch's global random generator alone.
        density: Fraction of the entries kept; k = max(1, floor(length x density)).
        axis: Rows are the fibres of this axis, as in `tw.ADTopK` ("auto", "published" or a number); None = the whole
            tensor is one row.
    """
    return OwnSelection(function, density, axis)
