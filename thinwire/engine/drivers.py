"""Drivers: several ways to run the same exchange programs.

InlineDriver   on the spot, in the caller's thread and on its stream; for synchronous hooks
ThreadDriver   gloo: one ordered communication thread on its own group (a collective may be neither issued nor
               awaited from a gloo callback)
StreamDriver   NCCL: everything is enqueued at once by a thread of its own, on side streams (`streams.py`)
VirtualRank    all ranks inside one process, for tests, studies and simulated training (`virtual.py`)
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.futures import Future

from thinwire.engine.agreement import agree, broadcast_bytes, gather_bytes
from thinwire.engine.network import Network
from thinwire.errors import DamageError, ExchangeError
from thinwire.exchange.requests import Batch, Common, Place, Program, Request
from thinwire.observe.ledger import Ledger
from thinwire.observe.stations import DECODE, ENCODE, EXCHANGE, station

T = TypeVar("T")


class Driver(ABC):
    """Starts programs in the order they are given; all ranks must give them in the same order."""

    place: Place
    ledger: Ledger
    """What this rank has sent."""
    network: Network | None = None
    """What real ranks are joined by; None where nothing travels."""
    merge_bytes: int = 0
    """Bytes of gradient up to which buckets are worth waiting for others, because each costs the host as much as a large one."""
    in_turn: bool = False
    """Whether the caller's thread asks for collectives, between those that it asks for itself. NCCL needs the same order of all of them
    on every rank: kernels of two groups that wait for each other's ranks can take each other's place on the device."""

    @abstractmethod
    def place_of(self, scope: str) -> Place:
        """Who this rank is among those of a scope."""

    def world_of(self, scope: str) -> int:
        """How many ranks a request of that scope has."""
        return self.place_of(scope).world

    def sent_bytes(self, request: Request) -> int:
        """Bytes this rank puts on the wire for a request."""
        return request.sent_bytes(self.world_of(request.scope))

    def agree(self, settings: dict[str, str]) -> None:  # noqa: B027
        """Raise the same sentence on every rank if `settings` differ between ranks."""

    def gather(self, content: bytes) -> list[bytes]:
        """What every rank brings, in rank order; here this one's alone."""
        return [content]

    def broadcast(self, content: bytes, source: int) -> bytes:
        """What the rank `source` brings."""
        return content

    @abstractmethod
    def add_hosts(self, per_host: int) -> None:
        """Make requests inside and between hosts of so many ranks possible; every rank calls it at the same point."""

    def new_future(self) -> Future[Any]:
        """A future that `start` can fulfil."""
        return Future()

    def hand_over(self, job: Callable[[], None], on_error: Callable[[Exception], None]) -> None:
        """Have the host work of a bucket done, behind what the caller's stream holds now. Here by the caller, at once.

        Jobs are done in the order they come. One that raises ends by calling `on_error`.
        """
        try:
            job()
        except Exception as error:
            on_error(error)

    def catch_up(self) -> None:  # noqa: B027
        """Wait for what was handed over or started, after an error before which nobody waited for it."""

    @abstractmethod
    def start(
        self, program: Program[Any], future: Future[Any] | None = None, what: str = ""
    ) -> Future[Any]:
        """Run the program, the rest of it behind its first request in the background; fulfils `future`.

        `what` says for whom, in case it fails or waits. Errors arrive through the future, never as an exception: one inside a DDP hook would wedge the reducer.
        """

    def run(self, program: Program[T], what: str = "") -> T:
        """Run a program between steps and wait for its result; every rank calls it at the same point."""
        future = self.new_future()

        def begin_it() -> None:
            self.start(program, future, what)

        self.hand_over(begin_it, partial(fail, future))
        result = future.wait()
        # A future brings the tensors of its result to the caller's stream, and not what a program has written elsewhere.
        self.catch_up()
        return result

    def close(self) -> None:  # noqa: B027
        """Finish what was started and stop."""


def fail(future: Future[Any], error: Exception) -> None:
    """End a future with an error, unless it has ended already."""
    if not future.done():
        future.set_exception(error)


def begin(program: Program[Any]) -> Batch:
    """Run a program up to its first request."""
    with station(ENCODE):
        return next(program)


def go_on(program: Program[Any], network: Network, batch: Batch, what: str = "") -> Batch:
    """Perform what a program asked for, on behalf of `what`, and run it up to its next request."""
    if all(isinstance(request, Common) for request in batch):
        with station(DECODE):
            return program.send(network.perform(batch))
    with station(EXCHANGE):
        replies = network.perform(batch, what)
    with station(DECODE):
        return program.send(replies)


def run_inline(program: Program[T], network: Network, what: str = "") -> T:
    """Run a program to its end in the calling thread."""
    try:
        batch = begin(program)
        while True:
            batch = go_on(program, network, batch, what)
    except StopIteration as finished:
        return finished.value


class NetworkDriver(Driver):
    """A driver of real ranks. The network's group belongs to it and ends with it."""

    def __init__(self, network: Network) -> None:
        self.network: Network = network
        self.place = network.place
        self.ledger = network.ledger
        self._at_end: list[Callable[[], None]] = [network.close]
        self._finalizer = weakref.finalize(self, _call_all, self._at_end)
        # The end of the interpreter ends everything by itself.
        self._finalizer.atexit = False

    def start_worker(self, work: Callable[[], None], stop: Callable[[], None]) -> threading.Thread:
        """Have a thread do `work` until `stop` is called; both must not know the driver, which may be dropped without `close`."""
        thread = threading.Thread(target=work, name="thinwire-exchange", daemon=True)
        thread.start()
        self._at_end.insert(0, partial(_end_thread, thread, stop))
        return thread

    def place_of(self, scope: str) -> Place:
        return self.network.places[scope]

    def agree(self, settings: dict[str, str]) -> None:
        agree(self.network.group, settings)

    def gather(self, content: bytes) -> list[bytes]:
        return gather_bytes(self.network.group, content)

    def broadcast(self, content: bytes, source: int) -> bytes:
        return broadcast_bytes(self.network.group, content, source)

    def add_hosts(self, per_host: int) -> None:
        self.network.add_hosts(per_host)

    def close(self) -> None:
        self._finalizer()


class InlineDriver(NetworkDriver):
    """Programs run to their end when they are started: on the CPU the caller waits, on CUDA its current stream does."""

    def start(
        self, program: Program[Any], future: Future[Any] | None = None, what: str = ""
    ) -> Future[Any]:
        future = self.new_future() if future is None else future
        try:
            future.set_result(run_inline(program, self.network, what))
        except Exception as error:
            fail(future, error)
        return future


Job = tuple[Program[Any], Batch, Future[Any], str]


class ThreadDriver(NetworkDriver):
    """One thread works off the programs first in, first out, so that every rank issues in the same order.

    The thread does not know the driver: one that is dropped without `close` ends it all the same.
    """

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        """Of the program that was given last."""
        self._working = False

    def start(
        self, program: Program[Any], future: Future[Any] | None = None, what: str = ""
    ) -> Future[Any]:
        future = self.new_future() if future is None else future
        try:
            batch = begin(program)
        except StopIteration as finished:
            future.set_result(finished.value)
        except Exception as error:
            fail(future, error)
        else:
            if not self._working:
                self._working = True
                self.start_worker(
                    partial(work_off, self._jobs, self.network), partial(self._jobs.put, None)
                )
            self._jobs.put((program, batch, future, what))
            self._last = future
        return future

    def catch_up(self) -> None:
        # Programs end in the order they were given.
        if self._last is not None:
            with contextlib.suppress(Exception):
                self._last.wait()

    def close(self) -> None:
        self._last = None
        super().close()


def _call_all(actions: Sequence[Callable[[], None]]) -> None:
    for action in actions:
        action()


def _end_thread(thread: threading.Thread, stop: Callable[[], None]) -> None:
    stop()
    # What drops a driver last may be the thread itself.
    if thread is not threading.current_thread():
        thread.join()


@torch.no_grad()
def work_off(jobs: queue.SimpleQueue[Job | None], network: Network) -> None:
    """Run programs to their ends, until None comes."""
    broken: Exception | None = None
    while (job := jobs.get()) is not None:
        program, batch, future, what = job
        try:
            if broken is not None:
                # After a failed collective the ranks are no longer in step; waiting for each further one in turn
                # would only multiply the timeout.
                raise broken
            while True:
                batch = go_on(program, network, batch, what)
        except StopIteration as finished:
            future.set_result(finished.value)
        except DamageError as error:
            # All ranks have raised it, so that they are still in step.
            fail(future, error)
        except Exception as error:
            # Not the error itself, whose traceback knows the driver.
            broken = ExchangeError(str(error))
            fail(future, error)
        # Nothing of a job may outlive it here: its handle may be dropped while this waits for the next one.
        del job, program, batch, future
