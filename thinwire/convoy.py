"""Convoy: buckets that travel together.

A collective costs its latency whatever it carries, and a compressed bucket is small: a network of 10 Gbit/s is idle most of the
time if every bucket of 25 MB sends its 1 % by itself. So the programs of neighbouring buckets wait until together they have
something to send, and then run side by side: what they ask for in the same round is one request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

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

    def __init__(self, driver: Driver, device: torch.device, worth_sending: int) -> None:
        self.driver = driver
        self.worth_sending = worth_sending
        self._device = device
        self._waiting: list[Passenger] = []
        self._nbytes = 0.0

    def add(self, program: Program[Tensor], nbytes: float) -> Future[Tensor]:
        """The program's result, some time after enough others have come or `leave` was called."""
        if nbytes >= self.worth_sending and not self._waiting:
            return self.driver.start(program)
        on_device: list[int | str | torch.device] = (
            [self._device] if self._device.type == "cuda" else []
        )
        passenger = Passenger(program, Future(devices=on_device))
        self._waiting.append(passenger)
        self._nbytes += nbytes
        if self._nbytes >= self.worth_sending:
            self.leave()
        return passenger.future

    def leave(self) -> None:
        """Start everything that waits."""
        if not self._waiting:
            return
        passengers, self._waiting, self._nbytes = self._waiting, [], 0.0
        journey: Program[list[Tensor]] = fuse_requests(together([p.program for p in passengers]))

        def arrive(done: Future[list[Tensor]]) -> None:
            try:
                results = done.value()
            except Exception as error:
                for passenger in passengers:
                    fail(passenger.future, error)
                return
            for passenger, result in zip(passengers, results, strict=True):
                passenger.future.set_result(result)

        self.driver.start(journey).add_done_callback(arrive)
