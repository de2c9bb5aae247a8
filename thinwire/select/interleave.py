"""Interleaving: all-dimension top-k on most turns, a global selection on every n-th.

All-dimension selection gives every row its share, global top-k sends the largest entries wherever they are; taking
turns does both. The turn follows from a counter that is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thinwire.kernels.journal import Journal
from thinwire.layout import RowTable, Slot, SlotRows
from thinwire.select.base import Picks, Selector, Session, SlotPicks, Turn, assemble
from thinwire.select.threshold_reused import ReusedTurn, ThresholdTopK
from thinwire.select.topk import AllDimensionTopK, TradTopK
from thinwire.validate import check_interleave, check_positive_int

ALL_DIMENSION = "all-dimension"
GLOBAL = "global"
# The last quarter of training, in which a tensor with a stable threshold needs no global turn any more.
LATE = 0.75


@dataclass(frozen=True)
class Interleaved(Selector):
    """Every `every`-th exchange of a parameter is global, the others are all-dimension.

    With a ThresholdTopK as `globally` and a known training length, tensors whose threshold is stable are
    all-dimension only in the last quarter.
    """

    dimensions: AllDimensionTopK
    """The selection of most turns."""
    globally: TradTopK | ThresholdTopK
    """The selection of every n-th turn."""
    every: int = 2
    """n."""
    total_steps: int | None = None
    """Training length, if it is known."""

    def __post_init__(self) -> None:
        check_interleave("every", self.every)
        if self.total_steps is not None:
            check_positive_int("total_steps", self.total_steps)

    @property
    def note_words(self) -> int:  # type: ignore[override]
        return self.globally.note_words

    takes_largest = True

    @property
    def has_exact_count(self) -> bool:  # type: ignore[override]
        return self.globally.has_exact_count

    def rows(self, slot: Slot, mode: Hashable = None) -> SlotRows:
        if mode is None or mode == ALL_DIMENSION:
            return self.dimensions.rows(slot)
        return self.globally.rows(slot, mode)

    def pick(self, c: Tensor, table: RowTable) -> Picks:
        """One all-dimension turn outside any session."""
        return self.dimensions.pick(c, table)

    def session(self) -> Session:
        if isinstance(self.globally, ThresholdTopK):
            return ThresholdInterleavedSession(self, self.globally)
        return InterleavedSession(self)


class InterleavedSession(Session):
    """Both selections are exact: they differ in their rows alone."""

    def __init__(self, selector: Interleaved) -> None:
        super().__init__(selector)
        self.setting = selector

    def begin(self, names: Sequence[str], counts: Sequence[int]) -> Hashable:
        return tuple(self._begin_slot(*pair) for pair in zip(names, counts, strict=True))

    def _begin_slot(self, name: str, count: int) -> str:
        turn, place = divmod(count, self.setting.every)
        return (
            self.global_mode(name, count, turn)
            if place == self.setting.every - 1
            else ALL_DIMENSION
        )

    def global_mode(self, name: str, count: int, turn: int) -> str:
        return GLOBAL

    def turn(self, modes: Hashable) -> Turn:
        assert isinstance(modes, tuple)
        return InterleavedTurn(self.setting.dimensions.session(), self.setting, modes)


class InterleavedTurn(Turn):
    """Exact top-k; every slot has the rows of its mode."""

    def __init__(self, session: Session, setting: Interleaved, modes: Sequence[str]) -> None:
        super().__init__(session)
        self.setting = setting
        self.modes = modes

    def rows(self, index: int, slot: Slot) -> SlotRows:
        return self.setting.rows(slot, self.modes[index])


class ThresholdInterleavedSession(InterleavedSession):
    """The global turns have thresholds, which learn."""

    def __init__(self, selector: Interleaved, globally: ThresholdTopK) -> None:
        super().__init__(selector)
        self.thresholds = globally.session()

    def keep_journal(self, journal: Journal) -> None:
        self.thresholds.keep_journal(journal)

    def global_mode(self, name: str, count: int, turn: int) -> str:
        late = self.setting.total_steps is not None and count >= LATE * self.setting.total_steps
        if late and self.thresholds.is_stable(name):
            return ALL_DIMENSION
        return self.thresholds.begin_slot(name, turn)

    def turn(self, modes: Hashable) -> Turn:
        assert isinstance(modes, tuple)
        if all(mode == ALL_DIMENSION for mode in modes):
            return super().turn(modes)
        if ALL_DIMENSION not in modes:
            return ReusedTurn(self.thresholds, modes)
        return MixedTurn(self, modes)

    def state_dict(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        return self.thresholds.state_dict(names)

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        self.thresholds.load_state_dict(state)


class MixedTurn(Turn):
    """Some slots select in every dimension, others by a threshold."""

    session: ThresholdInterleavedSession

    def __init__(self, session: ThresholdInterleavedSession, modes: Sequence[str]) -> None:
        super().__init__(session)
        self.modes = modes

    def rows(self, index: int, slot: Slot) -> SlotRows:
        return self.session.selector.rows(slot, self.modes[index])

    def only(self, members: Sequence[int]) -> Turn:
        return self.session.turn(tuple(self.modes[index] for index in members))

    def pick(self, c: Tensor, table: RowTable) -> Picks:
        pairs = zip(table.rows, self.modes, strict=True)
        parts = [self._pick_slot(c, rows, mode) for rows, mode in pairs]
        return assemble(c, table, parts, self.note_words)

    def _pick_slot(self, c: Tensor, rows: SlotRows, mode: str) -> SlotPicks:
        if mode == ALL_DIMENSION:
            return self.session.setting.dimensions.pick_slot(c, rows)
        return self.session.thresholds.pick_slot(c, rows, mode)

    def observe(self, table: RowTable, notes: Tensor, counts: Tensor) -> None:
        modes = [None if mode == ALL_DIMENSION else mode for mode in self.modes]
        self.session.thresholds.observe_slots(table, modes, notes, counts)
