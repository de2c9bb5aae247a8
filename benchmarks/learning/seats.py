"""Seats: processes that train one cell after the other, several at once on one device.

A process keeps its data, its compiled kernels and its CUDA context from cell to cell. One that fails is replaced, because an
error of a kernel can leave CUDA unusable.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait

from learning.orders import Epochs, Event, Order, Stop
from learning.process import serve

GRACE_S = 4.0
"""How long a process may take to stop when time is up."""
TICK_S = 1.0


class Seat:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.order: Order | None = None

    def give(self, order: Order) -> None:
        self.order = order
        # Whether the process has died meanwhile shows when it is listened to.
        with contextlib.suppress(OSError):
            self.pipe.send(order)

    def dismiss(self) -> None:
        """Let the process go when it has done what it is doing."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)

    def end(self, patience_s: float) -> None:
        self.process.join(patience_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Seats:
    """Opened when there is something to do, or a little before, so that a finished table costs no start."""

    def __init__(self, count: int, say: Callable[[str], None]) -> None:
        self.count = count
        self._say = say
        self._seats: list[Seat] = []
        self._said: set[str] = set()

    def open(self, wanted: int) -> None:
        """Have so many processes start already, up to as many as there are seats."""
        self._seats += [Seat() for _ in range(min(wanted, self.count) - len(self._seats))]

    @property
    def at_work(self) -> list[str]:
        """Keys of the orders that are being done."""
        return [seat.order.key for seat in self._seats if seat.order is not None]

    def tell(self, key: str, message: Epochs | Stop) -> None:
        for seat in self._seats:
            if seat.order is not None and seat.order.key == key:
                with contextlib.suppress(OSError):
                    seat.pipe.send(message)

    def run(self, next_order: Callable[[], Order | None]) -> Iterator[Event]:
        """Ask for an order whenever a seat is free; yields what happens, until nobody works and nothing is ordered."""
        while True:
            while len(self.at_work) < self.count and (order := next_order()) is not None:
                self._free_seat().give(order)
            busy = {seat.pipe: seat for seat in self._seats if seat.order is not None}
            if not busy:
                return
            for pipe in wait(list(busy), timeout=TICK_S):
                assert isinstance(pipe, Connection)
                yield from self._hear(busy[pipe])
            for seat in busy.values():
                if seat.order is not None and time.monotonic() > seat.order.deadline + GRACE_S:
                    key = seat.order.key
                    self._drop(seat, patience_s=0.0)
                    yield key, "late", None
            yield "", "tick", None

    def _free_seat(self) -> Seat:
        """One that has worked already begins sooner."""
        free = next((seat for seat in self._seats if seat.order is None), None)
        if free is None:
            free = Seat()
            self._seats.append(free)
        return free

    def _hear(self, seat: Seat) -> Iterator[Event]:
        assert seat.order is not None
        key = seat.order.key
        try:
            kind, content = seat.pipe.recv()
        except (EOFError, OSError):
            seat.process.join(1.0)
            kind, content = "failed", f"its process ended with {seat.process.exitcode}"
        if kind == "failed":
            self._say(f"{key} failed" + ("" if content in self._said else f": {content[-1500:]}"))
            self._said.add(content)
            self._drop(seat, patience_s=3.0)
        elif kind not in ("pace", "epoch"):
            seat.order = None
        yield key, kind, content

    def _drop(self, seat: Seat, patience_s: float) -> None:
        """Another one is opened when it is needed."""
        seat.order = None
        seat.end(patience_s)
        self._seats.remove(seat)

    def close(self) -> None:
        until = time.monotonic() + GRACE_S
        for seat in self._seats:
            seat.dismiss()
        for seat in self._seats:
            seat.end(max(0.0, until - time.monotonic()))
        self._seats.clear()
