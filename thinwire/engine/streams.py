"""StreamDriver: exchanges on CUDA, which the host enqueues and never waits for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from types import GeneratorType
from typing import Any

import torch
from torch.futures import Future

from thinwire.engine.drivers import NetworkDriver, begin, fail, go_on
from thinwire.engine.network import Network
from thinwire.engine.stalls import Wait
from thinwire.exchange.requests import Program
from thinwire.observe.stations import DRIVER, station

LOOKED_INTO = (GeneratorType, list, tuple, dict)
"""What may hold tensors of a program."""

Job = tuple[Callable[[], None], Callable[[Exception], None], torch.cuda.Event]


class StreamDriver(NetworkDriver):
    """Requests, waits and decoding are enqueued on side streams in program order.

    The host work of all this is done by a thread of its own: backward's kernels are launched by another one, which would
    stand still meanwhile, and on a fast GPU the launches are what a step waits for. Only `in_turn` the caller does it. Encoding
    has a stream behind the gradients it reads. Buckets take turns on a few side streams, so that decoding one does not hold
    back the next one's collective. What a program made on the first stream is kept until the side stream is through with it: the host ends
    the program long before.
    """

    merge_bytes = 100 << 20

    def __init__(self, network: Network, device: torch.device, streams: int = 4) -> None:
        super().__init__(network)
        self.device = device
        # First in line, so that the network never waits for a few small kernels behind the backward pass.
        self._encoding = torch.cuda.Stream(device, priority=-1)
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(streams)]
        self._turn = 0
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._held: list[tuple[torch.cuda.Event, Wait, Any]] = []
        """What programs held when they changed streams, each with the mark that ends its use."""
        # The end of training, not a step: streams may still use what is held and the group's communicator.
        self._at_end.insert(0, partial(torch.cuda.synchronize, device))

    def new_future(self) -> Future[Any]:
        return Future(devices=[self.device])

    def hand_over(self, job: Callable[[], None], on_error: Callable[[Exception], None]) -> None:
        ready = torch.cuda.current_stream(self.device).record_event()
        if self.in_turn:
            with torch.cuda.stream(self._encoding):
                do_job((job, on_error, ready), self._encoding)
            return
        if self._thread is None:
            self._thread = self.start_worker(
                partial(work_off, self._jobs, self.device, self._encoding),
                partial(self._jobs.put, None),
            )
        self._jobs.put((job, on_error, ready))

    def catch_up(self) -> None:
        if self._thread is not None and threading.current_thread() is not self._thread:
            done = threading.Event()
            self.hand_over(done.set, lambda error: done.set())
            done.wait()
        stream = torch.cuda.current_stream(self.device)
        for other in (self._encoding, *self._streams):
            stream.wait_stream(other)

    def start(
        self, program: Program[Any], future: Future[Any] | None = None, what: str = ""
    ) -> Future[Any]:
        future = self.new_future() if future is None else future
        try:
            self._run(program, future, what)
        except Exception as error:
            fail(future, error)
        return future

    def _run(self, program: Program[Any], future: Future[Any], what: str) -> None:
        try:
            batch = begin(program)
        except StopIteration as finished:
            future.set_result(finished.value)
            return
        stream = self._streams[self._turn % len(self._streams)]
        self._turn += 1
        held = (batch, find_held(program))
        name = self.network.name_of(batch, what)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            try:
                while True:
                    batch = go_on(program, self.network, batch, what)
            except StopIteration as finished:
                future.set_result(finished.value)
            finally:
                self._let_go()
                done = stream.record_event()
                wait = self.network.stalls.begin(lambda: name, done.query)
                self._held.append((done, wait, held))

    def _let_go(self) -> None:
        """Of what streams are through with."""
        kept = []
        for entry in self._held:
            if entry[0].query():
                self.network.stalls.end(entry[1])
            else:
                kept.append(entry)
        self._held = kept

    def close(self) -> None:
        super().close()
        self._thread = None
        self._held.clear()


def work_off(
    jobs: queue.SimpleQueue[Job | None], device: torch.device, stream: torch.cuda.Stream
) -> None:
    """Do jobs on the stream, each behind its event, until None comes. Does not know the driver, which may be dropped."""
    torch.cuda.set_device(device)
    with torch.cuda.stream(stream):
        while (entry := jobs.get()) is not None:
            do_job(entry, stream)
            del entry


@torch.no_grad()
def do_job(entry: Job, stream: torch.cuda.Stream) -> None:
    """Do a job on the stream, which is the current one, behind the job's event."""
    job, on_error, ready = entry
    try:
        with station(DRIVER):
            stream.wait_event(ready)
            job()
    except Exception as error:
        on_error(error)


def find_held(program: Any) -> list[Any]:
    """The local variables of a suspended program and of the programs it runs.

    A program makes tensors before its first request and reads some of them after the last one, by then on another
    stream. As long as the list lives, so does every tensor that the program has made and can still read. What several
    of them know is looked into once, so that the work grows with what there is.
    """
    held: list[Any] = []
    waiting: list[Any] = [program]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        # No number is used twice: what was looked into is in the list, and lives.
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            parts = list(one.values())
        elif not isinstance(one, GeneratorType):
            parts = list(one)
        elif one.gi_frame is not None:
            parts = [*one.gi_frame.f_locals.values(), one.gi_yieldfrom]
        else:
            continue
        held += parts
        # What containers hold too: a program may take it out of them before it is done with it.
        waiting += [part for part in parts if isinstance(part, LOOKED_INTO)]
    return held
