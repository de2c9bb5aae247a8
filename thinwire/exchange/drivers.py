"""Drivers: four ways to run the same exchange programs.

ThreadDriver   gloo: one ordered communication thread on its own group (a collective may be neither issued nor
               awaited from a gloo callback)
StreamDriver   NCCL: everything is enqueued at once by a thread of its own, on side streams; the host never waits
run_inline     on the spot, blocking; for synchronous hooks
run_virtual    all ranks inside one process, for tests, studies and simulated training
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.errors import ExchangeError
from thinwire.exchange.lockstep import one_round
from thinwire.exchange.network import Network, release_group
from thinwire.exchange.requests import (
    BETWEEN,
    EVERYONE,
    INSIDE,
    AllGather,
    AllReduce,
    AllToAll,
    AllToAllUneven,
    Batch,
    Broadcast,
    Place,
    Program,
    Request,
    Swap,
)
from thinwire.exchange.suspended import find_held
from thinwire.observe.ledger import Ledger
from thinwire.observe.stations import DECODE, ENCODE, EXCHANGE, station

T = TypeVar("T")
Job = Callable[[Callable[[], None]], None]


class Driver(ABC):
    """Starts programs in the order they are given; all ranks must give them in the same order."""

    place: Place

    def new_future(self) -> Future[Any]:
        """A future that `start` can fulfil."""
        return Future()

    def hand_over(self, job: Job) -> None:
        """Have the host work of a bucket done; here by the caller, at once.

        Jobs are done in the order they come and must not raise. What a job is given it calls first, where it can
        answer for an error: it then stands behind what the caller's stream holds now.
        """
        job(lambda: None)

    def catch_up(self) -> None:  # noqa: B027
        """Wait for what was handed over or started, after an error before which nobody waited for it."""

    @abstractmethod
    def start(self, program: Program[Any], future: Future[Any] | None = None) -> Future[Any]:
        """Run the program up to its first request in the caller, the rest in the background; fulfils `future`.

        Errors arrive through the future, never as an exception: one inside a DDP hook would wedge the reducer.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish what was started and stop."""


def fail(future: Future[Any], error: Exception) -> None:
    """End a future with an error, unless it has ended already."""
    if not future.done():
        future.set_exception(error)


def begin(program: Program[Any]) -> Batch:
    """Run a program up to its first request."""
    with station(ENCODE):
        return next(program)


def go_on(program: Program[Any], network: Network, batch: Batch) -> Batch:
    """Perform what a program asked for and run it up to its next request."""
    with station(EXCHANGE):
        replies = network.perform(batch)
    with station(DECODE):
        return program.send(replies)


def run_inline(program: Program[T], network: Network) -> T:
    """Run a program to its end in the calling thread."""
    try:
        batch = begin(program)
        while True:
            batch = go_on(program, network, batch)
    except StopIteration as finished:
        return finished.value


class ThreadDriver(Driver):
    """One thread works off the programs first in, first out, so that every rank issues in the same order.

    The network's group belongs to the driver and ends with it.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.place = network.place
        self._jobs: queue.SimpleQueue[tuple[Program[Any], Batch, Future[Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        """Of the program that was given last."""
        self._thread: threading.Thread | None = None
        self._broken: ExchangeError | None = None

    def start(self, program: Program[Any], future: Future[Any] | None = None) -> Future[Any]:
        future = self.new_future() if future is None else future
        try:
            batch = begin(program)
        except StopIteration as finished:
            future.set_result(finished.value)
        except Exception as error:
            fail(future, error)
        else:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="thinwire-exchange", daemon=True
                )
                self._thread.start()
            self._jobs.put((program, batch, future))
            self._last = future
        return future

    def catch_up(self) -> None:
        # Programs end in the order they were given.
        if self._last is not None:
            with contextlib.suppress(Exception):
                self._last.wait()

    @torch.no_grad()
    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            program, batch, future = job
            if self._broken is not None:
                # After a failed collective the ranks are no longer in step; waiting for each further one in turn
                # would only multiply the timeout.
                fail(future, self._broken)
                continue
            try:
                while True:
                    batch = go_on(program, self.network, batch)
            except StopIteration as finished:
                future.set_result(finished.value)
            except Exception as error:
                self._broken = ExchangeError(
                    f"the exchange failed on rank {self.place.rank} of {self.place.world} "
                    f"(has a worker died?): {error}"
                )
                fail(future, self._broken)

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        self._last = None
        release_group(self.network.group)


class StreamDriver(Driver):
    """Requests, waits and decoding are enqueued on side streams in program order.

    The host work of all this is done by a thread of its own: backward's kernels are launched by another one, which would
    stand still meanwhile, and on a fast GPU the launches are what a step waits for. Encoding has a stream behind the
    gradients it reads. Buckets take turns on a few side streams, so that decoding one does not hold back the next one's
    collective. What a program made on the first stream is kept until the side stream is through with it: the host ends
    the program long before.

    The network's group belongs to the driver and ends with it.
    """

    def __init__(self, network: Network, device: torch.device, streams: int = 4) -> None:
        self.network = network
        self.place = network.place
        self.device = device
        # First in line, so that the network never waits for a few small kernels behind the backward pass.
        self._encoding = torch.cuda.Stream(device, priority=-1)
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(streams)]
        self._turn = 0
        self._jobs: queue.SimpleQueue[tuple[Job, torch.cuda.Event] | None]
        self._jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._held: list[tuple[torch.cuda.Event, Any]] = []
        """What programs held when they changed streams, each with the mark that ends its use."""

    def new_future(self) -> Future[Any]:
        return Future(devices=[self.device])

    def hand_over(self, job: Job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="thinwire-exchange", daemon=True
            )
            self._thread.start()
        self._jobs.put((job, torch.cuda.current_stream(self.device).record_event()))

    @torch.no_grad()
    def _work(self) -> None:
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self._encoding):
            while (entry := self._jobs.get()) is not None:
                job, ready = entry
                job(functools.partial(self._encoding.wait_event, ready))

    def catch_up(self) -> None:
        if self._thread is not None and threading.current_thread() is not self._thread:
            done = threading.Event()
            self.hand_over(lambda _: done.set())
            done.wait()
        stream = torch.cuda.current_stream(self.device)
        for other in (self._encoding, *self._streams):
            stream.wait_stream(other)

    def start(self, program: Program[Any], future: Future[Any] | None = None) -> Future[Any]:
        future = self.new_future() if future is None else future
        try:
            self._run(program, future)
        except Exception as error:
            fail(future, error)
        return future

    def _run(self, program: Program[Any], future: Future[Any]) -> None:
        try:
            batch = begin(program)
        except StopIteration as finished:
            future.set_result(finished.value)
            return
        stream = self._streams[self._turn % len(self._streams)]
        self._turn += 1
        held = (batch, find_held(program))
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            try:
                while True:
                    batch = go_on(program, self.network, batch)
            except StopIteration as finished:
                future.set_result(finished.value)
            finally:
                self._held = [(done, kept) for done, kept in self._held if not done.query()]
                self._held.append((stream.record_event(), held))

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        # The end of training, not a step: streams may still use what is held and the group's communicator.
        torch.cuda.synchronize(self.device)
        self._held.clear()
        release_group(self.network.group)


def run_virtual(
    programs: Sequence[Program[T]],
    ledger: Ledger | Sequence[Ledger] | None = None,
    *,
    per_host: int | None = None,
) -> list[T]:
    """Run the programs of all ranks in lockstep in one process; rank order is the order of `programs`.

    `ledger` counts what rank 0 sends, a list of ledgers what every rank sends. With `per_host` the ranks are placed
    on hosts of that many, for requests inside and between hosts.
    """
    return VirtualRanks(len(programs), ledger, per_host).run(programs)


class VirtualRanks:
    """All ranks of a group inside one process."""

    def __init__(
        self, world: int, ledger: Ledger | Sequence[Ledger] | None, per_host: int | None
    ) -> None:
        self.world = world
        self.ledgers = [ledger] if isinstance(ledger, Ledger) else list(ledger or [])
        everyone = list(range(world))
        self.teams = {EVERYONE: [everyone]}
        if per_host is not None:
            hosts = [everyone[start : start + per_host] for start in range(0, world, per_host)]
            self.teams[INSIDE] = hosts
            self.teams[BETWEEN] = [list(team) for team in zip(*hosts, strict=True)]

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        results: list[Any] = [None] * self.world
        batches = [_step(program, None, results, rank) for rank, program in enumerate(programs)]
        while any(batch is not None for batch in batches):
            replies = self._perform(batches)
            with one_round():
                batches = [
                    _step(program, replies[rank], results, rank)
                    for rank, program in enumerate(programs)
                ]
        return results

    def _perform(self, batches: Sequence[Batch | None]) -> list[list[Tensor]]:
        lengths = {None if batch is None else len(batch) for batch in batches}
        if len(lengths) != 1 or None in lengths:
            raise ExchangeError("virtual ranks disagree about the number of requests in this round")
        columns = list(zip(*(batch for batch in batches if batch is not None), strict=True))
        replies: list[list[Tensor]] = [[] for _ in batches]
        for column in columns:
            for team in self._teams(column):
                members = [column[rank] for rank in team]
                for rank, reply in zip(team, answer(members), strict=True):
                    replies[rank].append(reply)
                for rank in team:
                    if rank < len(self.ledgers):
                        self.ledgers[rank].record(column[rank], 0.0, len(team))
        return replies

    def _teams(self, column: Sequence[Request]) -> list[list[int]]:
        scopes = {request.scope for request in column}
        if len(scopes) != 1 or not scopes <= self.teams.keys():
            raise ExchangeError(f"virtual ranks asked for the scopes {sorted(scopes)} in one round")
        return self.teams[scopes.pop()]


def _step(
    program: Program[Any], replies: list[Tensor] | None, results: list[Any], rank: int
) -> Batch | None:
    try:
        return next(program) if replies is None else program.send(replies)
    except StopIteration as finished:
        results[rank] = finished.value
        return None


def answer(column: Sequence[Request]) -> list[Tensor]:
    """The replies of all ranks of a team to one collective."""
    described = {_description(request) for request in column}
    if len(described) != 1:
        raise ExchangeError(
            f"virtual ranks asked for different collectives: {sorted(map(str, described))}"
        )
    tensors = [request.tensor for request in column]
    match column[0]:
        case AllReduce():
            total = tensors[0].clone()
            for tensor in tensors[1:]:
                total += tensor
            return [total.clone() for _ in tensors]
        case AllGather():
            # One copy for all: what was gathered is only read.
            return [torch.stack(tensors)] * len(tensors)
        case AllToAll():
            # One copy for all: a reply's row is only read.
            crossed = torch.stack(tensors).transpose(0, 1).contiguous()
            return list(crossed.unbind(0))
        case AllToAllUneven():
            return _cross_uneven(column)
        case Broadcast(source=source):
            return [tensors[source].clone() for _ in tensors]
        case Swap():
            return _deliver_swaps(column)
    raise ExchangeError(f"unknown request {column[0].kind!r}")


def _description(request: Request) -> tuple[Any, ...]:
    """What all ranks must agree on."""
    shape = tuple(request.tensor.shape)
    if isinstance(request, AllToAllUneven):
        shape = shape[1:]
    source = request.source if isinstance(request, Broadcast) else None
    return request.kind, request.phase, request.tensor.dtype, shape, source


def _cross_uneven(column: Sequence[Request]) -> list[Tensor]:
    pieces = []
    for request in column:
        assert isinstance(request, AllToAllUneven)
        pieces.append(request.tensor.split(list(request.send)))
    replies = []
    for rank, request in enumerate(column):
        assert isinstance(request, AllToAllUneven)
        arrived = [piece[rank] for piece in pieces]
        if tuple(map(len, arrived)) != request.receive:
            raise ExchangeError(
                f"virtual rank {rank} expects {request.receive} rows and is sent {tuple(map(len, arrived))}"
            )
        replies.append(torch.cat(arrived))
    return replies


def _deliver_swaps(column: Sequence[Request]) -> list[Tensor]:
    replies = []
    for rank, request in enumerate(column):
        assert isinstance(request, Swap)
        if request.source is None:
            replies.append(request.tensor.new_empty(0))
            continue
        other = column[request.source]
        assert isinstance(other, Swap)
        if other.to != rank:
            raise ExchangeError(
                f"virtual rank {rank} waits for rank {request.source}, which sends to {other.to}"
            )
        replies.append(other.tensor.clone())
    return replies
