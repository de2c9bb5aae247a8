"""Interleaving: all-dimension top-k on most turns, a global selection on every n-th.

All-dimension selection gives every row its share, global top-k sends the largest entries wherever they are; taking
turns does both. The turn follows from a counter that is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thinwire.layout import Slot
from thinwire.select.base import Picks, Selector, Session, SlotPicks, assemble
from thinwire.select.rows import RowTable, SlotRows
from thinwire.select.threshold import ThresholdSession, ThresholdTopK
from thinwire.select.topk import AllDimensionTopK, TradTopK
from thinwire.validate import check_interleave, check_positive_int
from thinwire.wire.codec import Header

ALL_DIMENSION = "all-dimension"
# The last quarter of training, in which a tensor with a stable threshold needs no global turn any more.
LATE = 0.75


@dataclass(frozen=True)
class Interleaved(Selector):
    """Every `every`-th exchange of a parameter is global, the others are all-dimension.

    With a ThresholdTopK as `globally` and a known training length, tensors whose threshold is stable are
    all-dimension only in the last quarter.
    """

    dimensions: AllDimensionTopK
    globally: TradTopK | ThresholdTopK
    every: int = 2
    total_steps: int | None = None

    def __post_init__(self) -> None:
        check_interleave("every", self.every)
        if self.total_steps is not None:
            check_positive_int("total_steps", self.total_steps)

    @property
    def note_words(self) -> int:  # type: ignore[override]
        return self.globally.note_words

    @property
    def has_exact_count(self) -> bool:  # type: ignore[override]
        return self.globally.has_exact_count

    def rows(self, slot: Slot, mode: Hashable = None) -> SlotRows:
        """Without a mode: the all-dimension turn, by which the plan decides."""
        if mode is None or mode == ALL_DIMENSION:
            return self.dimensions.rows(slot)
        assert isinstance(mode, tuple)
        return self.globally.rows(slot, mode[1])

    def pick(self, c: Tensor, table: RowTable) -> Picks:
        """One all-dimension turn outside any session."""
        return self.dimensions.pick(c, table)

    def session(self) -> Session:
        return InterleavedSession(self)


class InterleavedSession(Session):
    def __init__(self, selector: Interleaved) -> None:
        super().__init__(selector)
        self.setting = selector
        self.global_session = selector.globally.session()

    def mode(self, name: str, step: int) -> Hashable:
        turn, place = divmod(step, self.setting.every)
        if place != self.setting.every - 1 or self._only_dimensions(name, step):
            return ALL_DIMENSION
        return ("global", self.global_session.mode(name, turn))

    def selector_in(self, modes: Sequence[Hashable]) -> Selector:
        """A turn without global selection has nothing to note."""
        if all(mode == ALL_DIMENSION for mode in modes):
            return self.setting.dimensions
        return self.setting

    def _only_dimensions(self, name: str, step: int) -> bool:
        total = self.setting.total_steps
        if total is None or step < LATE * total:
            return False
        return isinstance(self.global_session, ThresholdSession) and self.global_session.is_stable(
            name
        )

    def pick(self, c: Tensor, table: RowTable, modes: Sequence[Hashable]) -> Picks:
        parts = [
            self._pick_slot(c, rows, mode) for rows, mode in zip(table.rows, modes, strict=True)
        ]
        return assemble(c, table, parts, self.setting.note_words)

    def _pick_slot(self, c: Tensor, rows: SlotRows, mode: Hashable) -> SlotPicks:
        if isinstance(self.global_session, ThresholdSession) and isinstance(mode, tuple):
            return self.global_session.pick_slot(c, rows, mode[1])
        return self.setting.dimensions.pick_slot(c, rows)

    def observe(self, table: RowTable, modes: Sequence[Hashable], header: Header) -> None:
        if isinstance(self.global_session, ThresholdSession):
            kinds = [mode[1] if isinstance(mode, tuple) else None for mode in modes]
            self.global_session.observe_slots(table, kinds, header.notes, header.counts)

    def state_dict(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        return self.global_session.state_dict(names)

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        self.global_session.load_state_dict(state)
