"""Drivers: four ways to run the same exchange programs.

ThreadDriver   gloo: one ordered communication thread on its own group (a collective may be neither issued nor
               awaited from a gloo callback)
StreamDriver   NCCL: everything is enqueued at once, on side streams; the host never waits
run_inline     on the spot, blocking; for synchronous hooks
run_virtual    all ranks inside one process, for tests, studies and simulated training
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.errors import ExchangeError
from thinwire.exchange.network import Network, release_group
from thinwire.exchange.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Batch,
    Place,
    Program,
    Request,
)
from thinwire.observe.ledger import Ledger

T = TypeVar("T")


class Driver(ABC):
    """Starts programs in the order they are given; all ranks must give them in the same order."""

    place: Place

    @abstractmethod
    def start(self, program: Program[Tensor]) -> Future[Tensor]:
        """Run the program up to its first request in the caller, the rest in the background.

        Errors arrive through the future, never as an exception: one inside a DDP hook would wedge the reducer.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish what was started and stop."""


def fail(future: Future[Tensor], error: Exception) -> None:
    """End a future with an error; torch's stub wrongly wants a tensor here."""
    future.set_exception(error)  # type: ignore[arg-type]


def run_inline(program: Program[T], network: Network) -> T:
    """Run a program to its end in the calling thread."""
    try:
        batch = next(program)
        while True:
            batch = program.send(network.perform(batch))
    except StopIteration as finished:
        return finished.value


class ThreadDriver(Driver):
    """One thread works off the programs first in, first out, so that every rank issues in the same order.

    The network's group belongs to the driver and ends with it.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.place = network.place
        self._jobs: queue.SimpleQueue[tuple[Program[Tensor], Batch, Future[Tensor]] | None]
        self._jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, program: Program[Tensor]) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        try:
            batch = next(program)
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
        return future

    @torch.no_grad()
    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            program, batch, future = job
            try:
                while True:
                    batch = program.send(self.network.perform(batch))
            except StopIteration as finished:
                future.set_result(finished.value)
            except Exception as error:
                died = ExchangeError(
                    f"the exchange failed on rank {self.place.rank} of {self.place.world} "
                    f"(has a worker died?): {error}"
                )
                fail(future, died)

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        release_group(self.network.group)


class StreamDriver(Driver):
    """Requests, waits and decoding are enqueued on side streams in program order.

    Encoding runs on the caller's stream, behind the gradients it reads. Buckets take turns on a few side streams,
    so that decoding one does not hold back the next one's collective.
    """

    def __init__(self, network: Network, device: torch.device, streams: int = 4) -> None:
        self.network = network
        self.place = network.place
        self.device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(streams)]
        self._turn = 0

    def start(self, program: Program[Tensor]) -> Future[Tensor]:
        future: Future[Tensor] = Future(devices=[self.device])
        try:
            self._run(program, future)
        except Exception as error:
            fail(future, error)
        return future

    def _run(self, program: Program[Tensor], future: Future[Tensor]) -> None:
        try:
            batch = next(program)
        except StopIteration as finished:
            future.set_result(finished.value)
            return
        stream = self._streams[self._turn % len(self._streams)]
        self._turn += 1
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            try:
                while True:
                    for request in batch:
                        request.tensor.record_stream(stream)
                    batch = program.send(self.network.perform(batch))
            except StopIteration as finished:
                future.set_result(finished.value)

    def close(self) -> None:
        torch.cuda.synchronize(self.device)


def run_virtual(programs: Sequence[Program[T]], ledger: Ledger | None = None) -> list[T]:
    """Run the programs of all ranks in lockstep in one process; rank order is the order of `programs`.

    `ledger` counts what rank 0 sends.
    """
    world = len(programs)
    results: list[Any] = [None] * world
    batches = [_step(program, None, results, rank) for rank, program in enumerate(programs)]
    while any(batch is not None for batch in batches):
        replies = _perform_virtual(batches)
        if ledger is not None:
            for request in batches[0] or ():
                ledger.record(request, 0.0)
        batches = [
            _step(program, replies[rank], results, rank) for rank, program in enumerate(programs)
        ]
    return results


def _step(
    program: Program[Any], replies: list[Tensor] | None, results: list[Any], rank: int
) -> Batch | None:
    try:
        return next(program) if replies is None else program.send(replies)
    except StopIteration as finished:
        results[rank] = finished.value
        return None


def _perform_virtual(batches: Sequence[Batch | None]) -> list[list[Tensor]]:
    lengths = {None if batch is None else len(batch) for batch in batches}
    if len(lengths) != 1 or None in lengths:
        raise ExchangeError("virtual ranks disagree about the number of requests in this round")
    columns = list(zip(*(batch for batch in batches if batch is not None), strict=True))
    answered = [_answer(column) for column in columns]
    return [[column[rank] for column in answered] for rank in range(len(batches))]


def _answer(column: Sequence[Request]) -> list[Tensor]:
    """The replies of all ranks to one collective."""
    described = {(r.kind, r.phase, r.tensor.dtype, tuple(r.tensor.shape)) for r in column}
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
            gathered = torch.stack(tensors)
            return [gathered.clone() for _ in tensors]
        case AllToAll():
            return [torch.stack([t[rank] for t in tensors]) for rank in range(len(tensors))]
    raise ExchangeError(f"unknown request {column[0].kind!r}")
