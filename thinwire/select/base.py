"""The contract of a selection: which entries of the compensated gradient are worth sending.

A `Selector` is a frozen setting. Its `Session` lives as long as the handle and keeps what the selection learns
per parameter name. A `Turn` is how the slots of a group are selected in one exchange. Every decision that changes
shapes (the modes of a turn) is a function of state that is the same on all ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.described import Described
from thinwire.forms import Formed
from thinwire.kernels.journal import Journal
from thinwire.layout import RowTable, Slot, SlotRows


@dataclass(frozen=True, eq=False)
class Picks(Described):
    """Chosen entries, one per place in the row table.

    Where a slot has fewer entries than places (`counts`), the last places are left over and hold value 0 at index 0,
    which adds nothing wherever it is decoded. `counts` is None when every place is taken.
    """

    values: Tensor
    """[places] of the table: the entries themselves."""
    indices: Tensor
    """int64 [places]: where each lies in its row."""
    counts: Tensor | None = None
    """int32 [slots]: how many of a slot's places are taken; None = all."""
    notes: Tensor | None = None
    """[slots, selector.note_words] float32 that travel in the payload header."""


LARGEST_OF_ROWS = "the largest magnitudes of every row"
"""The form of selections that choose the `keep` largest magnitudes of every row of their table, ties to the lowest index."""
ABOVE_THRESHOLDS = "magnitudes above thresholds"
"""The form of selections whose turns are `ThresholdTurn`s (thinwire/select/threshold_reused.py)."""

ABOVE_ESTIMATES = "magnitudes above estimates"
"""The form of selections whose turns are `EstimateTurn`s (thinwire/select/finish.py): thresholds are found by looks at all slots."""

RANDOM_PLACES = "random places, the same on all ranks"
"""The form of selections that draw places whatever c holds, and fill all of them."""

WHOLE_CHUNKS = "whole chunks by their norms"
"""The form of selections whose rows are `ChunkRows` and whose chunks have the largest sums of magnitudes."""


class Selector(Formed, ABC):
    """A frozen description of a selection method."""

    computed_by: ClassVar[tuple[str, ...]] = ("pick", "session")

    torch_only: str = ""
    """The option by which it loses its form, as it is written; empty if none does."""
    note_words: int = 0
    """float32 words per slot that the selection adds to the payload header."""
    has_exact_count: bool = True
    """Whether every rank fills every place of the table."""
    takes_largest: bool = False
    """Whether the largest magnitude of every slot is always among the chosen, so that an infinity is seen there."""
    same_on_all_ranks: bool = False
    """Whether all ranks choose the same places, whatever their gradients."""

    in_chunks: bool = False
    """Whether it chooses whole chunks by their norms: its rows are `ChunkRows` (thinwire/select/chunks.py)."""

    @abstractmethod
    def rows(self, slot: Slot, mode: Hashable = None) -> SlotRows:
        """How a slot is cut into rows and how many entries each row may send.

        Without a mode: the usual rows, by which the plan decides.
        """

    @abstractmethod
    def pick(self, c: Tensor, table: RowTable) -> Picks:
        """Choose entries of the flat compensated gradient `c`."""

    def session(self) -> Session:
        return Session(self)


class Session:
    """A selector at work. This one has no state; selections that learn override it."""

    journal: Journal | None = None
    """Where a session notes what steps change in it, so that one that is skipped leaves no trace; None if nobody asks."""

    def __init__(self, selector: Selector) -> None:
        self.selector = selector

    def keep_journal(self, journal: Journal) -> None:
        self.journal = journal

    def begin(self, names: Sequence[str], counts: Sequence[int]) -> Hashable:
        """Begin the next exchange of some parameters, each of which was exchanged `counts` times before.

        Returns their modes, the same on all ranks: what changes shapes and tables. Equal modes have equal turns.
        """
        return None

    def turn(self, modes: Hashable) -> Turn:
        """How parameters in these modes are selected."""
        return Turn(self)

    def pick(self, c: Tensor, table: RowTable) -> Picks:
        return self.selector.pick(c, table)

    def state_dict(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Numbers and tensors per parameter name, for all `names`, also those not exchanged yet."""
        return {}

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        """Take from `state` what belongs to this session's parameters."""


class Turn:
    """How the slots of a group are selected in one exchange, made once by a `session` for every combination of modes."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.form = session.selector.form
        self.torch_only = session.selector.torch_only if self.form is not None else ""
        if self.torch_only:
            self.form = None
        self.note_words = session.selector.note_words
        self.has_exact_count = session.selector.has_exact_count

    @property
    def name(self) -> str:
        return type(self.session.selector).__name__

    def rows(self, index: int, slot: Slot) -> SlotRows:
        """The rows of the `index`-th slot."""
        return self.session.selector.rows(slot)

    def only(self, members: Sequence[int]) -> Turn:
        """The turn of some of the slots."""
        return self

    def pick(self, c: Tensor, table: RowTable) -> Picks:
        return self.session.pick(c, table)

    def observe(self, table: RowTable, notes: Tensor, counts: Tensor) -> None:
        """Learn from all ranks' headers, effective at the next exchange.

        `notes` are float32 [world, slots, note words], `counts` int32 [world, slots].
        """


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
