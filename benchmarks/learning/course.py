"""Course: one task of a sitting. Which cell is next, how many epochs all of them get, and who makes room when time gets short.

1. As many cells as there are seats begin, the most important ones first. Their learning rate still rises, which it does the same way
   whatever the number of epochs.
2. When all of them have shown their pace, that number is chosen such that the urgent cells can be finished, and they are told.
   It is known beforehand if it was given, or if there are rows of an earlier sitting.
3. A cell begins when a seat is free and both it and what runs already can be finished in time.
4. If a cell that runs cannot be finished in time any more, the least important one makes room, until the rest can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from learning.cells import Cell, Study
from learning.orders import Epochs, Order, Stop
from learning.planning import RESERVE, Pace, Pending, choose_epochs, plan_seconds
from learning.process import KEPT_LOSSES
from learning.seats import Seats
from learning.store import Store

SAME_LOSS = 0.05
"""How far the losses of the first steps with and without graphs may differ, relatively."""
PLAIN = " without a graph"
"""Behind the key of a few steps that only check what graphs compute."""
PATIENCE_S = 60.0
"""After the first cell has shown its pace, how long to wait for the others'."""
LATER_RESERVE = 1.03
"""What is added to the time that cells still need when they have trained for a while."""

Say = Callable[[str], None]
MakeOrder = Callable[[Cell, bool, int | None], Order]
"""(cell, with a graph, steps) to an order."""


@dataclass
class Running:
    """A cell at work, as it was last heard of."""

    cell: Cell
    graph: bool
    since: float
    done: float = 0.0
    """Epochs."""
    load: int = 1
    """Cells that ran side by side then."""
    shown: bool = False
    """Whether its pace is known."""


class Course:
    def __init__(
        self,
        study: Study,
        *,
        seats: Seats,
        store: Store,
        say: Say,
        order: MakeOrder,
        end: float,
        last: float,
        epochs: int | None,
        graph: bool,
        note: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`end` is when the time of this task is over, `last` that of the sitting, which urgent cells may use."""
        self._study, self._seats, self._store, self._say = study, seats, store, say
        self._order, self._end, self._last, self._note = order, end, last, note
        self._graph, self._clock = graph, clock
        self._pace = Pace()
        every = study.cells(study.most)
        earlier = store.rows_of(every)
        self._pace.hear_rows(earlier, seats.count)
        self._epochs = epochs or (earlier[0]["epochs"] if earlier else None)
        if self._epochs is not None:
            every = study.cells(self._epochs)
            aside = store.set_aside(every)
        else:
            # Whatever number is chosen, these are not of it.
            aside = store.set_aside([replace(cell, epochs=0) for cell in every])
        if aside:
            say(f"{study.task}: {aside} rows of other settings are in rows-before.json now")
        self._waiting = [cell for cell in every if not store.has(cell)]
        self._check = graph and not any(row["graph"] for row in earlier)
        """Whether it is still to be seen that graphs compute what plain passes do."""
        self._running: dict[str, Running] = {}
        self._stopping: set[str] = set()
        self._first_shown: float | None = None
        self._losses: dict[str, list[float]] = {}
        self._tried_without: set[str] = set()
        self._twin: str | None = None
        """The cell whose first steps are compared with the same ones without a graph."""
        self._planned = False

    def run(self) -> None:
        if not self._waiting:
            self._say(f"{self._study.task}: every cell is there already")
            return
        if self._settled and self._pace.rates:
            self._show_plan()
        else:
            self._say(
                f"{self._study.task}: {len(self._waiting)} cells; the first steps show the pace"
            )
        for key, kind, content in self._seats.run(self._next_order):
            self._hear(key, kind, content)
        for cell in self._waiting:
            self._say(f"{cell.key}: no time is left for it")

    # -- beginning -----------------------------------------------------------------------------------------------------

    def _next_order(self) -> Order | None:
        now = self._clock()
        if now > self._last:
            return None
        if self._check and self._twin is None and self._waiting:
            twin = next((c for c in self._waiting if c.method == "dense"), self._waiting[0])
            self._twin = twin.key
            return replace(self._order(twin, False, KEPT_LOSSES), key=twin.key + PLAIN)
        for cell in self._waiting:
            if not self._settled or self._fits(cell, now):
                self._waiting.remove(cell)
                graph = self._graph and cell.key not in self._tried_without
                self._running[cell.key] = Running(cell, graph, now)
                order = self._order(cell, graph, None)
                return order if self._settled else replace(order, fewest=self._study.fewest)
        return None

    @property
    def _settled(self) -> bool:
        return self._epochs is not None

    def _limit(self, cell: Cell) -> float:
        return self._last if cell.turn <= self._study.urgent else self._end

    def _fits(self, cell: Cell, now: float) -> bool:
        """Whether it can be finished in time, and does not keep one that runs from that."""
        if not self._pace.rates:
            return True
        together = [Running(cell, self._graph, now), *self._running.values()]
        # With more reserve than the one that makes it stop again.
        return not self._find_late(together, len(together), now, RESERVE)

    def _expected_end(self, running: Running, load: float, now: float) -> float:
        """If so many cells run side by side from now on."""
        assert self._epochs is not None
        rate = self._pace.rate(running.cell.method)
        # What it has done since it was last heard of, at the pace of before.
        done = running.done + max(0.0, now - running.since) / rate.at(running.load)
        pending = Pending(running.cell.method, min(done, self._epochs) if running.shown else None)
        begun = now if running.shown else running.since
        return begun + pending.seconds(self._pace, self._epochs, load)

    # -- listening -----------------------------------------------------------------------------------------------------

    def _hear(self, key: str, kind: str, content: Any) -> None:
        if key.endswith(PLAIN):
            self._hear_plain(kind, content)
        elif kind in ("pace", "epoch"):
            self._hear_pace(self._running[key], content)
        elif kind != "tick":
            self._hear_end(key, kind, content)
        if not self._planned:
            self._plan()
        elif kind == "epoch":
            self._make_room(LATER_RESERVE)

    def _hear_pace(self, running: Running, content: dict[str, Any]) -> None:
        load = len(self._running)
        # It was measured from the last time on.
        before = running.load if running.shown else load
        self._pace.hear(running.cell.method, content, (before + load) / 2)
        running.since, running.done, running.shown = self._clock(), content["done"], True
        running.load = load
        self._first_shown = self._first_shown or running.since
        if "losses" in content and running.graph:
            self._losses[running.cell.key] = content["losses"]
            self._compare_losses()
        if "test" in content:
            self._store.add_epoch(running.cell, content["test"])

    def _hear_end(self, key: str, kind: str, content: Any) -> None:
        running = self._running.pop(key)
        cell = running.cell
        self._stopping.discard(key)
        if kind == "done":
            self._store.add_row(cell, content, self._note, side_by_side=running.load)
            self._say(self._store.describe(cell))
        elif kind == "late":
            self._say(f"{key}: time was up")
        elif kind == "failed" and running.graph:
            self._say(f"{key}: again without a graph")
            self._tried_without.add(key)
            self._put_back(cell)
        elif kind == "stopped":
            self._put_back(cell)

    def _put_back(self, cell: Cell) -> None:
        """Where it was in the order of importance."""
        self._waiting = sorted([*self._waiting, cell], key=lambda c: (c.turn, c.seed))

    # -- graphs --------------------------------------------------------------------------------------------------------

    def _hear_plain(self, kind: str, content: Any) -> None:
        if kind == "done":
            self._losses[PLAIN] = content["losses"]
            self._compare_losses()
        elif kind in ("failed", "late"):
            self._check = False

    def _compare_losses(self) -> None:
        """Begin again without graphs if their first steps differ from plain ones."""
        plain, twin = self._losses.get(PLAIN), self._losses.get(self._twin or "")
        if not (self._check and plain and twin and len(twin) >= len(plain)):
            return
        self._check = False
        apart = max(abs(a - b) / max(abs(a), 1e-9) for a, b in zip(plain, twin, strict=False))
        self._say(f"losses with and without graphs differ by {apart:.2%} at most")
        if not apart < SAME_LOSS:
            self._graph = False
            self._say("which is too much: all cells begin again without graphs")
            for key in list(self._running):
                self._stop(key)

    # -- planning ------------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Choose the number of epochs if that is to be done, and say how long it takes, when enough is known for it."""
        shown = [one.shown for one in self._running.values()]
        if self._first_shown is None or self._stopping or not any(shown):
            return
        now = self._clock()
        if not all(shown) and now < self._first_shown + PATIENCE_S:
            return
        if not self._settled:
            pending = self._pending(self._study.urgent)
            left = self._end - now
            epochs = choose_epochs(pending, self._pace, self._seats.count, left, self._study)
            self._waiting = [replace(cell, epochs=epochs) for cell in self._waiting]
            for key, one in self._running.items():
                one.cell = replace(one.cell, epochs=epochs)
                self._seats.tell(key, Epochs(epochs))
            self._epochs = epochs
        self._show_plan()
        self._make_room(RESERVE)

    def _pending(self, turn: int) -> list[Pending]:
        """Cells up to this turn; those that run first."""
        begun = [
            Pending(one.cell.method, one.done if one.shown else None)
            for one in self._running.values()
            if one.cell.turn <= turn
        ]
        return [*begun, *(Pending(cell.method) for cell in self._waiting if cell.turn <= turn)]

    def _show_plan(self) -> None:
        """First what cannot be done, then how long each cell takes and when each round is over."""
        assert self._epochs is not None
        self._planned = True
        study, epochs, seats, pace = self._study, self._epochs, self._seats.count, self._pace
        left = self._last - self._clock()
        cells = [*(one.cell for one in self._running.values()), *self._waiting]
        turns = sorted({cell.turn for cell in cells})
        first = self._pending(turns[0])
        fewest = min(epochs, study.fewest)
        if plan_seconds(first, pace, seats, fewest) > left:
            warning = (
                f"NOT ENOUGH TIME: {left:.0f} s are left for {study.task}, too little for its {len(first)} most "
                f"important cells with {fewest} epochs"
            )
            self._store.warnings.append(warning)
            self._say(warning)
        self._say(f"{study.task}: {len(cells)} cells of {epochs} epochs, {left:.0f} s left")
        load = min(seats, len(cells))
        for turn in turns:
            each = ", ".join(
                f"{c.key.partition('/')[2]} {Pending(c.method).seconds(pace, epochs, load):.0f} s"
                for c in cells
                if c.turn == turn
            )
            over = plan_seconds(self._pending(turn), pace, seats, epochs, load)
            self._say(f"  round {turn + 1}: {each}; over in {over:.0f} s")

    def _make_room(self, reserve: float) -> None:
        """Stop the least important cells as long as one that runs cannot be finished beside them."""
        now = self._clock()
        while True:
            staying = [one for key, one in self._running.items() if key not in self._stopping]
            late = self._find_late(staying, len(staying), now, reserve)
            if not late or len(staying) == 1:
                return
            # Nobody makes room for what cannot be finished in any case.
            candidates = self._find_late(late, 1, now, 1.0) or staying
            chosen = max(candidates, key=lambda one: (one.cell.turn, candidates.index(one)))
            self._say(f"{chosen.cell.key}: makes room")
            self._stop(chosen.cell.key)

    def _find_late(
        self, cells: Sequence[Running], load: int, now: float, reserve: float
    ) -> list[Running]:
        return [
            one
            for one in cells
            if now + reserve * (self._expected_end(one, load, now) - now) > self._limit(one.cell)
        ]

    def _stop(self, key: str) -> None:
        self._stopping.add(key)
        self._seats.tell(key, Stop())
