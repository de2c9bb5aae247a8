"""The contract of a selection: which entries of the compensated gradient are worth sending.

A `Selector` is a frozen setting. Its `Session` lives as long as the handle and keeps what the selection learns
per parameter name. Every decision that changes shapes (`mode`) is a function of rank-uniform state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.layout import Slot
from thinwire.select.rows import RowTable, SlotRows

if TYPE_CHECKING:
    from thinwire.wire.codec import Header


@dataclass(frozen=True, eq=False)
class Picks:
    """Chosen entries, one per place in the row table.

    Where a slot has fewer entries than places (`counts`), the last places are left over and hold value 0 at index 0,
    which adds nothing wherever it is decoded. `counts` is None when every place is taken.
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
    same_on_all_ranks: bool = False
    """Whether all ranks choose the same places, whatever their gradients."""

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

    def selector_in(self, modes: Sequence[Hashable]) -> Selector:
        """Whose note words and counts a turn has in which the slots of a group are in these modes."""
        return self.selector

    def rows(self, slot: Slot, mode: Hashable) -> SlotRows:
        return self.selector.rows(slot, mode)

    def pick(self, c: Tensor, table: RowTable, modes: Sequence[Hashable]) -> Picks:
        return self.selector.pick(c, table)

    def observe(self, table: RowTable, modes: Sequence[Hashable], header: Header) -> None:
        """Learn from all ranks' headers (counts, notes); effective at the next step."""

    def state_dict(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Numbers and tensors per parameter name, for all `names`, also those not exchanged yet."""
        return {}

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        """Take from `state` what belongs to this session's parameters."""


@dataclass(frozen=True, eq=False)
class SlotPicks:
    """One slot's part of `Picks`: as many indices as the slot has places, `count` of them taken (None = all)."""

    indices: Tensor
    count: Tensor | None = None
    notes: Tensor | None = None


def assemble(c: Tensor, table: RowTable, parts: Sequence[SlotPicks], note_words: int) -> Picks:
    """Picks out of per-slot parts; places beyond a slot's count get value 0."""
    counts = torch.stack(
        [
            torch.full((), rows.entries, dtype=torch.int32, device=c.device)
            if part.count is None
            else part.count
            for part, rows in zip(parts, table.rows, strict=True)
        ]
    )
    picks = picks_of(c, table, concatenate([part.indices for part in parts], c.device), counts)
    nothing = torch.zeros(note_words, device=c.device)
    notes = [part.notes.float() if part.notes is not None else nothing for part in parts]
    return replace(picks, notes=torch.stack(notes))


def picks_of(c: Tensor, table: RowTable, indices: Tensor, counts: Tensor) -> Picks:
    """Picks whose slots use the first `counts` of their places; the others hold value 0 at index 0."""
    used = table.entry_places(c.device) < counts[table.entry_slots(c.device).long()]
    values = torch.where(used, c[table.positions(indices)], 0.0)
    return Picks(values, torch.where(used, indices, 0), counts.to(torch.int32))


def picks_at(c: Tensor, table: RowTable, indices: Tensor) -> Picks:
    """Picks that fill every place of the table with the values of `c` found there."""
    values = c[table.positions(indices)] if table.entries else c[:0]
    return Picks(values, indices)


def concatenate(parts: list[Tensor], device: torch.device) -> Tensor:
    """Row-local indices of several slots as one flat int64 tensor."""
    if not parts:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return torch.cat([part.reshape(-1) for part in parts])
