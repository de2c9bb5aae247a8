"""ThresholdTopK: global top-k by a reused threshold, watched by a Monitor, refreshed by an Updater.

An exact selection every tau turns gives the threshold; in between one compare replaces the sort. Ming et al., "ADTopk"
(HPDC'24), section on threshold estimation.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.threshold import select_above
from thinwire.kernels.topk import row_topk
from thinwire.layout import Slot
from thinwire.observe.hostcopy import HostCopy
from thinwire.select.base import Picks, Selector, Session, SlotPicks, assemble
from thinwire.select.rows import WHOLE_TENSOR, RowTable, SlotRows, keep_count, rows_along
from thinwire.validate import check_density, check_positive_int, check_positive_number
from thinwire.wire.codec import Header

# Room for more entries than k between refreshes; the surplus is cut by magnitude.
CAPACITY_FACTOR = 1.25
EXACT, REUSE = "exact", "reuse"
NOT_MEASURED = -1.0


class Drift(enum.Enum):
    """How far a threshold moved since the last exact selection, against the tolerance."""

    STEADY = "less than half the tolerance"
    SMALL = "less than the tolerance"
    AT_TOLERANCE = "exactly the tolerance"
    LARGE = "more than the tolerance"
    JUMP = "more than twice the tolerance"


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """Watches threshold and iteration: how much did the one move, how far along is the other."""

    tolerance: float = 0.1
    """Relative change of the threshold that counts as 1."""
    warmup: int = 15
    """Turns that select exactly before any threshold is reused."""

    def __post_init__(self) -> None:
        check_positive_number("tolerance", self.tolerance)
        check_positive_int("warmup", self.warmup)

    def measure(self, old: Tensor, new: Tensor) -> Tensor:
        """|old - new| in units of the tolerance at `old`; on the device, without a host wait."""
        moved = (old - new).abs()
        return torch.where(moved == 0, 0.0, moved / (self.tolerance * old))

    def judge(self, drift: float) -> Drift:
        if drift < 0.5:
            return Drift.STEADY
        if drift < 1.0:
            return Drift.SMALL
        if drift == 1.0:
            return Drift.AT_TOLERANCE
        # An infinite or undefined drift (a threshold that left zero) is a jump too.
        return Drift.LARGE if drift <= 2.0 else Drift.JUMP

    def warming_up(self, turn: int) -> bool:
        return turn < self.warmup


@dataclass(frozen=True, kw_only=True)
class Updater:
    """Decides how long a threshold may be reused: longer while it is stable, shorter when it moves."""

    tau: int = 5
    """Turns between exact selections at the start."""
    floor: int = 5

    def __post_init__(self) -> None:
        check_positive_int("tau", self.tau)
        check_positive_int("floor", self.floor)

    def next(self, tau: int, drift: Drift) -> tuple[int, bool | None]:
        """(new tau, stable); stable is None where the drift says nothing."""
        match drift:
            case Drift.STEADY:
                return tau + 2, True
            case Drift.SMALL:
                return tau + 1, True
            case Drift.LARGE:
                return max(tau - 1, self.floor), False
            case Drift.JUMP:
                return max(tau - 2, self.floor), False
        return tau, None


@dataclass(frozen=True)
class ThresholdTopK(Selector):
    """Top-k over the whole tensor, exact every tau turns, by the last exact threshold in between.

    1. Warm-up and refresh turns: exact top-k; threshold = smallest kept magnitude; its drift goes into the header.
    2. Other turns: every |x| >= threshold, at most 1.25 k (the largest), at least one.
    3. All ranks read all headers and move tau by the largest drift, effective at the next turn. A rank that filled
       its capacity, or kept fewer than half of k, makes the next turn a refresh on every rank.
    """

    density: float
    monitor: Monitor = field(default_factory=Monitor)
    updater: Updater = field(default_factory=Updater)

    note_words = 2
    has_exact_count = False

    def __post_init__(self) -> None:
        check_density("density", self.density)

    def rows(self, slot: Slot, mode: Hashable = None) -> SlotRows:
        exact = rows_along(slot, WHOLE_TENSOR, self.density)
        if mode != REUSE:
            return exact
        return exact.keeping(min(exact.length, math.ceil(CAPACITY_FACTOR * exact.keep)))

    def pick(self, c: Tensor, table: RowTable) -> Picks:
        """One exact selection outside any session."""
        session = self.session()
        return session.pick(c, table, [EXACT] * len(table.rows))

    def session(self) -> ThresholdSession:
        return ThresholdSession(self)


@dataclass(frozen=True, eq=False)
class News:
    """What all ranks' headers said of a parameter's last turn; read by the host one turn later."""

    mode: str
    keep: int
    capacity: int
    drifts: HostCopy
    """[world, slots]"""
    counts: HostCopy
    """[world, slots]"""
    which: int
    """The parameter's column in both."""


@dataclass
class Watch:
    """What the session knows of one parameter. Only `threshold` is this rank's own."""

    tau: int
    due: int
    stable: bool = False
    threshold: Tensor | None = None
    turn: int = 0
    news: News | None = None


class ThresholdSession(Session):
    def __init__(self, selector: ThresholdTopK) -> None:
        super().__init__(selector)
        self.setting = selector
        self.watches: dict[str, Watch] = {}

    def mode(self, name: str, step: int) -> Hashable:
        """Exact or reuse in this turn; `step` counts the parameter's global turns, from 0."""
        watch = self._watch(name)
        self._digest(watch)
        watch.turn = step
        if self.setting.monitor.warming_up(step) or watch.threshold is None or step >= watch.due:
            return EXACT
        return REUSE

    def is_stable(self, name: str) -> bool:
        watch = self._watch(name)
        self._digest(watch)
        return watch.stable

    def _watch(self, name: str) -> Watch:
        if name not in self.watches:
            tau = self.setting.updater.tau
            self.watches[name] = Watch(tau, self.setting.monitor.warmup + tau)
        return self.watches[name]

    def pick(self, c: Tensor, table: RowTable, modes: Sequence[Hashable]) -> Picks:
        parts = [
            self.pick_slot(c, rows, mode) for rows, mode in zip(table.rows, modes, strict=True)
        ]
        return assemble(c, table, parts, self.selector.note_words)

    def pick_slot(self, c: Tensor, rows: SlotRows, mode: Hashable) -> SlotPicks:
        watch = self._watch(rows.slot.name)
        row = rows.matrix(c)
        if mode == REUSE:
            assert watch.threshold is not None
            indices, count = select_above(row, watch.threshold.to(row.device), rows.keep)
            notes = torch.stack([watch.threshold.to(row.device), row.new_full((), NOT_MEASURED)])
            return SlotPicks(indices, count, notes)
        indices = row_topk(row, rows.keep)
        new = row[indices].abs().amin()
        old = new if watch.threshold is None else watch.threshold.to(row.device)
        watch.threshold = new
        return SlotPicks(indices, None, torch.stack([new, self.setting.monitor.measure(old, new)]))

    def share_thresholds(self, names: Sequence[str], places: Sequence[Tensor]) -> None:
        """Move the thresholds into `places`, where kernels read and replace them; not a number where there is none yet."""
        for name, place in zip(names, places, strict=True):
            watch = self._watch(name)
            if watch.threshold is place:
                continue
            if watch.threshold is None:
                place.fill_(math.nan)
            else:
                place.copy_(watch.threshold)
            watch.threshold = place

    def observe(self, table: RowTable, modes: Sequence[Hashable], header: Header) -> None:
        self.observe_slots(table, [str(mode) for mode in modes], header.notes, header.counts)

    def observe_slots(
        self, table: RowTable, modes: Sequence[str | None], notes: Tensor, counts: Tensor
    ) -> None:
        """Keep all ranks' news of the slots that have a mode; the host reads it at the next turn, when it has long arrived."""
        if not any(modes):
            return
        drifts, filled = HostCopy(notes[..., 1]), HostCopy(counts)
        for which, (rows, mode) in enumerate(zip(table.rows, modes, strict=True)):
            if mode is not None:
                keep = keep_count(rows.length, self.setting.density)
                news = News(mode, keep, rows.keep, drifts, filled, which)
                self._watch(rows.slot.name).news = news

    def _digest(self, watch: Watch) -> None:
        """Turn the last turn's headers into decisions. Every rank reads the same numbers."""
        news, watch.news = watch.news, None
        if news is None:
            return
        if news.mode == REUSE:
            counts = news.counts.read()[:, news.which]
            if bool((counts >= news.capacity).any() or (2 * counts < news.keep).any()):
                watch.due = watch.turn + 1
        elif not self.setting.monitor.warming_up(watch.turn):
            largest = float(news.drifts.read()[:, news.which].nan_to_num(torch.inf).max())
            watch.tau, stable = self.setting.updater.next(
                watch.tau, self.setting.monitor.judge(largest)
            )
            watch.stable = watch.stable if stable is None else stable
            watch.due = watch.turn + watch.tau

    def state_dict(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        state = {}
        for name in names:
            watch = self._watch(name)
            self._digest(watch)
            threshold = math.nan if watch.threshold is None else float(watch.threshold)
            state[name] = {
                "tau": watch.tau,
                "due": watch.due,
                "stable": watch.stable,
                "turn": watch.turn,
                "threshold": threshold,
            }
        return state

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        for name, saved in state.items():
            if "threshold" not in saved:
                # Saved by a method without thresholds: this one starts to watch from here.
                continue
            threshold = float(saved["threshold"])
            self.watches[name] = Watch(
                tau=int(saved["tau"]),
                due=int(saved["due"]),
                stable=bool(saved["stable"]),
                turn=int(saved["turn"]),
                threshold=None if math.isnan(threshold) else torch.tensor(threshold),
            )
