"""Convoy: buckets that travel together.

A collective costs its latency whatever it carries, and a compressed bucket is small: a network of 10 Gbit/s is idle most of the
time if every bucket of 25 MB sends its 1 % by itself. So the programs of neighbouring buckets wait until together they have
something to send, and then run side by side: what they ask for in the same round is one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.futures import Future

from thinwire.errors import ExchangeError
from thinwire.exchange.drivers import Driver, fail
from thinwire.exchange.fused import fuse_requests
from thinwire.exchange.requests import Program, together

WORTH_SENDING = 512 << 10
"""Bytes a rank sends; less than this is mostly latency on any network that needs compression."""


@dataclass(frozen=True, eq=False)
class Passenger:
    program: Program[Tensor]
    future: Future[Tensor]


class Convoy:
    """Starts programs in the order they come, several at a time. What leaves together is a function of sizes, which are the same
    on all ranks.
    """

    def __init__(self, driver: Driver, worth_sending: int) -> None:
        self.driver = driver
        self.worth_sending = worth_sending
        self._waiting: list[Passenger] = []
        self._nbytes = 0.0

    def add(self, program: Program[Tensor], nbytes: float, future: Future[Tensor]) -> None:
        """`future` gets the program's result, some time after enough others have come or `leave` was called."""
        if nbytes >= self.worth_sending and not self._waiting:
            self.driver.start(program, future)
            return
        self._waiting.append(Passenger(program, future))
        self._nbytes += nbytes
        if self._nbytes >= self.worth_sending:
            self.leave()

    def leave(self) -> None:
        """Start everything that waits."""
        if not self._waiting:
            return
        passengers, self._waiting, self._nbytes = self._waiting, [], 0.0

        def break_off(done: Future[None]) -> None:
            try:
                done.value()
            except Exception as error:
                for passenger in passengers:
                    fail(passenger.future, error)

        self.driver.start(_travel(passengers)).add_done_callback(break_off)

    def abandon(self) -> None:
        """Leave everything behind that waits: its step broke off before the last bucket came, and has been settled."""
        passengers, self._waiting, self._nbytes = self._waiting, [], 0.0
        for passenger in passengers:
            fail(passenger.future, ExchangeError("the step ended before its last bucket came"))


def _travel(passengers: Sequence[Passenger]) -> Program[None]:
    """Futures are fulfilled in here, where the driver's stream is the current one."""
    programs = [passenger.program for passenger in passengers]
    results: list[Tensor] = yield from fuse_requests(together(programs))
    for passenger, result in zip(passengers, results, strict=True):
        passenger.future.set_result(result)
