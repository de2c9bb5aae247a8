"""ThresholdTopK: global top-k by a reused threshold, watched by a Monitor, refreshed by an Updater.

An exact selection every tau turns gives the threshold; in between one compare replaces the sort. Ming et al., "ADTopk"
(HPDC'24), section on threshold estimation.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.described import Described
from thinwire.kernels.above import select_above
from thinwire.kernels.cuda.fused_threshold import Goal
from thinwire.kernels.hostcopy import HostCopy
from thinwire.kernels.topk import row_topk
from thinwire.layout import WHOLE_TENSOR, RowTable, Slot, SlotRows, keep_count, rows_along
from thinwire.select.base import (
    ABOVE_THRESHOLDS,
    Picks,
    Selector,
    Session,
    SlotPicks,
    Turn,
    assemble,
)
from thinwire.validate import check_density, check_positive_int, check_positive_number

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
class Monitor(Described):
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

    def evaluate(self, drift: float) -> Drift:
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
class Updater(Described):
    """Decides how long a threshold may be reused: longer while it is stable, shorter when it moves."""

    tau: int = 5
    """Turns between exact selections at the start."""
    floor: int = 5
    """The fewest turns between exact selections, however much the threshold moves."""

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


class ThresholdTurn(Turn, ABC):
    """A turn of the form `ABOVE_THRESHOLDS`: every slot is one row and sends what reaches a threshold of its own.

    Beside `pick` it says what kernels need to know to do the same.
    """

    tolerance: float
    """The relative change of a threshold that counts as a drift of 1."""
    first_threshold: float = math.nan
    """Where thresholds start; not a number where an exact selection finds them."""

    @abstractmethod
    def usual_entries(self, slots: Sequence[Slot]) -> list[int]:
        """About how many entries each slot sends in a turn, by which room is made."""

    @abstractmethod
    def goals(self, table: RowTable) -> list[Goal]:
        """How many entries each slot of the table has to send."""

    def share_thresholds(self, names: Sequence[str], places: Sequence[Tensor]) -> None:
        """Keep the thresholds in `places` from now on, where kernels read and replace them."""

    def note_thresholds(self, thresholds: Tensor) -> None:
        """The kernels of a step begin, which may replace `thresholds`."""


@dataclass(frozen=True)
class ThresholdTopK(Selector):
    """Top-k over the whole tensor, exact every tau turns, by the last exact threshold in between.

    1. Warm-up and refresh turns: exact top-k; threshold = smallest kept magnitude; its drift goes into the header.
    2. Other turns: every |x| >= threshold, at most 1.25 k (the largest), at least one.
    3. All ranks read all headers and move tau by the largest drift, effective at the next turn. A rank that filled
       its capacity, or kept fewer than half of k, makes the next turn a refresh on every rank.
    """

    density: float
    """Fraction of the entries kept."""
    monitor: Monitor = field(default_factory=Monitor)
    """When a threshold counts as stable, and how long the exact warm-up is."""
    updater: Updater = field(default_factory=Updater)
    """How often the threshold is refreshed, in global turns."""

    form = ABOVE_THRESHOLDS
    takes_largest = True
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
        return self.session().turn((EXACT,) * len(table.rows)).pick(c, table)

    def session(self) -> ThresholdSession:
        return ThresholdSession(self)


@dataclass(frozen=True, eq=False)
class HeaderReport:
    """What all ranks' headers said of a parameter's last turn; read by the host one turn later."""

    mode: str
    keep: int
    capacity: int
    drifts: HostCopy
    """[world, slots]"""
    counts: HostCopy
    """[world, slots]"""
    column: int
    """The parameter's own in both."""


@dataclass
class Watch:
    """What the session knows of one parameter. Only `threshold` is this rank's own."""

    tau: int
    due: int
    stable: bool = False
    threshold: Tensor | None = None
    turn: int = 0
    report: HeaderReport | None = None


class ThresholdSession(Session):
    def __init__(self, selector: ThresholdTopK) -> None:
        super().__init__(selector)
        self.setting = selector
        self.watches: dict[str, Watch] = {}

    def begin(self, names: Sequence[str], counts: Sequence[int]) -> Hashable:
        return tuple(self.begin_slot(*pair) for pair in zip(names, counts, strict=True))

    def begin_slot(self, name: str, turn: int) -> str:
        """Exact or reuse; `turn` counts the parameter's global turns, from 0."""
        watch = self.watch(name)
        self._read_report(watch)
        watch.turn = turn
        if self.setting.monitor.warming_up(turn) or watch.threshold is None or turn >= watch.due:
            return EXACT
        return REUSE

    def turn(self, modes: Hashable) -> Turn:
        assert isinstance(modes, tuple)
        return ReusedTurn(self, modes)

    def is_stable(self, name: str) -> bool:
        watch = self.watch(name)
        self._read_report(watch)
        return watch.stable

    def watch(self, name: str) -> Watch:
        """What is known of a parameter's threshold."""
        if name not in self.watches:
            tau = self.setting.updater.tau
            self.watches[name] = Watch(tau, self.setting.monitor.warmup + tau)
        return self.watches[name]

    def pick_slot(self, c: Tensor, rows: SlotRows, mode: Hashable) -> SlotPicks:
        watch = self.watch(rows.slot.name)
        row = rows.matrix(c)
        # One that was loaded is float64 on the CPU, which holds every row's exactly; it is moved once.
        known = watch.threshold = None if watch.threshold is None else watch.threshold.to(row)
        if mode == REUSE:
            assert known is not None
            indices, count = select_above(row, known, rows.keep)
            notes = torch.stack([known, row.new_full((), NOT_MEASURED)])
            return SlotPicks(indices, count, notes)
        indices = row_topk(row, rows.keep)
        new = row[indices].abs().amin()
        old = new if known is None else known
        if self.journal is not None:
            self.journal.note(new, torch.full_like(new, math.nan) if known is None else old)
        watch.threshold = new
        return SlotPicks(indices, None, torch.stack([new, self.setting.monitor.measure(old, new)]))

    def share_thresholds(self, names: Sequence[str], places: Sequence[Tensor]) -> None:
        """Move the thresholds into `places`, where kernels read and replace them; not a number where there is none yet."""
        for name, place in zip(names, places, strict=True):
            watch = self.watch(name)
            if watch.threshold is place:
                continue
            if watch.threshold is None:
                place.fill_(math.nan)
            else:
                place.copy_(watch.threshold)
            watch.threshold = place

    def note_thresholds(self, thresholds: Tensor) -> None:
        """Kernels are about to replace some of these."""
        if self.journal is not None:
            self.journal.note(thresholds, thresholds.clone())

    def observe_slots(
        self, table: RowTable, modes: Sequence[str | None], notes: Tensor, counts: Tensor
    ) -> None:
        """Keep what all ranks say of the slots that have a mode; the host reads it at the next turn, when it has long arrived."""
        if not any(modes):
            return
        drifts, filled = HostCopy(notes[..., 1]), HostCopy(counts)
        for column, (rows, mode) in enumerate(zip(table.rows, modes, strict=True)):
            if mode is not None:
                keep = keep_count(rows.length, self.setting.density)
                report = HeaderReport(mode, keep, rows.keep, drifts, filled, column)
                self.watch(rows.slot.name).report = report

    def _read_report(self, watch: Watch) -> None:
        """Turn the last turn's headers into decisions. Every rank reads the same numbers."""
        report, watch.report = watch.report, None
        if report is None:
            return
        if report.mode == REUSE:
            counts = report.counts.read()[:, report.column]
            if bool((counts >= report.capacity).any() or (2 * counts < report.keep).any()):
                watch.due = watch.turn + 1
        elif not self.setting.monitor.warming_up(watch.turn):
            largest = float(report.drifts.read()[:, report.column].nan_to_num(torch.inf).max())
            watch.tau, stable = self.setting.updater.next(
                watch.tau, self.setting.monitor.evaluate(largest)
            )
            watch.stable = watch.stable if stable is None else stable
            watch.due = watch.turn + watch.tau

    def state_dict(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        state = {}
        for name in names:
            watch = self.watch(name)
            self._read_report(watch)
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
                threshold=None
                if math.isnan(threshold)
                else torch.tensor(threshold, dtype=torch.float64),
            )


class ReusedTurn(ThresholdTurn):
    """Every slot selects exactly and remembers its threshold, or reuses it."""

    session: ThresholdSession

    def __init__(self, session: ThresholdSession, modes: Sequence[str]) -> None:
        super().__init__(session)
        self.modes = modes
        self.tolerance = session.setting.monitor.tolerance

    def rows(self, index: int, slot: Slot) -> SlotRows:
        return self.session.selector.rows(slot, self.modes[index])

    def only(self, members: Sequence[int]) -> Turn:
        return ReusedTurn(self.session, [self.modes[index] for index in members])

    def pick(self, c: Tensor, table: RowTable) -> Picks:
        pairs = zip(table.rows, self.modes, strict=True)
        parts = [self.session.pick_slot(c, rows, mode) for rows, mode in pairs]
        return assemble(c, table, parts, self.note_words)

    def observe(self, table: RowTable, notes: Tensor, counts: Tensor) -> None:
        self.session.observe_slots(table, self.modes, notes, counts)

    def usual_entries(self, slots: Sequence[Slot]) -> list[int]:
        return [keep_count(slot.numel, self.session.setting.density) for slot in slots]

    def goals(self, table: RowTable) -> list[Goal]:
        return [
            Goal(rows.keep, rows.keep, exact=True) if mode == EXACT else Goal(1, 1, exact=False)
            for rows, mode in zip(table.rows, self.modes, strict=True)
        ]

    def share_thresholds(self, names: Sequence[str], places: Sequence[Tensor]) -> None:
        self.session.share_thresholds(names, places)

    def note_thresholds(self, thresholds: Tensor) -> None:
        if EXACT in self.modes:
            self.session.note_thresholds(thresholds)
