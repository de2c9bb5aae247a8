"""The contract of a selection: which entries of the compensated gradient are worth sending.

A `Selector` is a frozen setting. Its `Session` lives as long as the handle and keeps what the selection learns
per parameter name. Every decision that changes shapes (`mode`) is a function of rank-uniform state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.layout import Slot
from thinwire.select.rows import RowTable, SlotRows


@dataclass(frozen=True, eq=False)
class Picks:
    """Chosen entries, one per place in the row table.

    Where a slot has fewer entries than places (`counts`), the places left over hold value 0 at index 0, which
    adds nothing wherever it is decoded. `counts` is None when every place is taken.
    """

    values: Tensor
    indices: Tensor
    counts: Tensor | None = None
    notes: Tensor | None = None
    """[slots, selector.note_words] float32 that travel in the payload header."""


class Selector(ABC):
    """A frozen description of a selection method."""

    note_words: int = 0
    """float32 words per slot that the selection adds to the payload header."""
    has_exact_count: bool = True
    """Whether every rank fills every place of the table."""

    @abstractmethod
    def rows(self, slot: Slot, mode: Hashable) -> SlotRows:
        """How a slot is cut into rows and how many entries each row may send."""

    @abstractmethod
    def pick(self, c: Tensor, table: RowTable) -> Picks:
        """Choose entries of the flat compensated gradient `c`."""

    def session(self) -> Session:
        return Session(self)


class Session:
    """A selector at work. This one has no state; selections that learn override it."""

    def __init__(self, selector: Selector) -> None:
        self.selector = selector

    def mode(self, name: str, step: int) -> Hashable:
        """The rank-uniform mode of this parameter's `step`-th exchange; tables are cached by it."""
        return None

    def rows(self, slot: Slot, mode: Hashable) -> SlotRows:
        return self.selector.rows(slot, mode)

    def pick(self, c: Tensor, table: RowTable, modes: Sequence[Hashable]) -> Picks:
        return self.selector.pick(c, table)

    def observe(self, table: RowTable, modes: Sequence[Hashable], notes: Tensor) -> None:
        """Learn from all ranks' header notes [world, slots, note_words]; effective at the next step."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


def picks_at(c: Tensor, table: RowTable, indices: Tensor) -> Picks:
    """Picks that fill every place of the table with the values of `c` found there."""
    values = c[table.positions(indices)] if table.entries else c[:0]
    return Picks(values, indices)


def concatenate(parts: list[Tensor], device: torch.device) -> Tensor:
    """Row-local indices of several slots as one flat int64 tensor."""
    if not parts:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return torch.cat([part.reshape(-1) for part in parts])
