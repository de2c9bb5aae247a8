"""Fleet: the real pipelines of several workers on one device, fed with random gradients; rank 0's work is timed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.bench.compress_gradients import Gradients
from thinwire.bench.compress_layout import lay_out_buckets
from thinwire.bench.compress_timing import Stopwatch
from thinwire.exchange.drivers import Driver, answer, begin
from thinwire.exchange.requests import Batch, Place, Program
from thinwire.layout import Bucket, ParameterInfo
from thinwire.methods.base import Method
from thinwire.observe.ledger import Ledger
from thinwire.observe.stats import Tally
from thinwire.pipeline import Pipeline
from thinwire.plan.policy import make_plan

ENCODE = "encode"
DECODE = "decode"
MOMENTUM = 0.9
"""For methods that take it over from the optimizer."""


@dataclass
class Running:
    """One bucket's exchange on one worker; `batch` is what it waits for, None at its end."""

    program: Program[Tensor]
    batch: Batch | None

    def go_on(self, replies: Sequence[Tensor]) -> None:
        try:
            self.batch = self.program.send(list(replies))
        except StopIteration:
            self.batch = None


class Collector(Driver):
    """Runs programs up to their first request and keeps them."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.running: list[Running] = []

    def start(
        self, program: Program[Tensor], future: Future[Tensor] | None = None
    ) -> Future[Tensor]:
        try:
            self.running.append(Running(program, begin(program)))
        except StopIteration:
            self.running.append(Running(program, None))
        return self.new_future() if future is None else future

    def close(self) -> None: ...


class Fleet:
    """All workers' pipelines for one model under one method.

    A lap is one training step's communication, without the network:
    1. every worker encodes all its buckets, up to the first collective of each (rank 0: "encode");
    2. what they ask for is answered from all workers' tensors;
    3. every worker goes on to the next collective or the end (rank 0: "decode"), and again from 2.
    """

    def __init__(
        self,
        infos: Sequence[ParameterInfo],
        method: Method,
        *,
        world: int,
        device: torch.device,
        bucket_mb: float | None,
    ) -> None:
        method = method.with_momentum(MOMENTUM, False)
        plan = make_plan(infos, method, [], world, quiet=True)
        self.drivers = [Collector(Place(rank, world)) for rank in range(world)]
        self.pipelines = [
            Pipeline(
                plan,
                driver,
                Tally(Ledger(world)),
                device=device,
                deterministic=False,
                scale=lambda: None,
            )
            for driver in self.drivers
        ]
        # Layouts are compared by identity, and tables are kept by them: each worker has its own.
        self.buckets = [
            [
                Bucket(layout, torch.zeros(layout.numel, dtype=layout.dtype, device=device))
                for layout in lay_out_buckets(infos, device, bucket_mb)
            ]
            for _ in range(world)
        ]
        self.gradients = Gradients(device, max(bucket.layout.numel for bucket in self.buckets[0]))
        self.payload_bytes = 0
        """What rank 0 asked to be sent first, in the last lap."""
        self._step = 0

    @torch.no_grad()
    def lap(self, watch: Stopwatch) -> None:
        for rank, buckets in enumerate(self.buckets):
            for which, bucket in enumerate(buckets):
                self.gradients.fill(bucket.flat, self._step, rank, which)
        self._step += 1
        for rank in range(len(self.pipelines)):
            with self._timed(watch, rank, ENCODE):
                self._encode(rank)
        first = [running.batch for running in self.drivers[0].running if running.batch is not None]
        self.payload_bytes = sum(request.tensor.nbytes for batch in first for request in batch)
        while waiting := [
            which
            for which, running in enumerate(self.drivers[0].running)
            if running.batch is not None
        ]:
            replies = {which: self._answer(which) for which in waiting}
            for rank, driver in enumerate(self.drivers):
                with self._timed(watch, rank, DECODE):
                    for which in waiting:
                        driver.running[which].go_on(replies[which][rank])
        for driver in self.drivers:
            assert all(running.batch is None for running in driver.running)
            driver.running.clear()

    def _timed(self, watch: Stopwatch, rank: int, name: str) -> AbstractContextManager[None]:
        return watch.span(name) if rank == 0 else nullcontext()

    def _encode(self, rank: int) -> None:
        started = self.drivers[rank].running
        for count, bucket in enumerate(self.buckets[rank], start=1):
            future = self.pipelines[rank].reduce(bucket)
            if len(started) < count:
                future.wait()  # raises what went wrong
                raise AssertionError("a bucket was not started")

    def _answer(self, which: int) -> list[list[Tensor]]:
        """Per worker, the replies to what one bucket's programs ask for."""
        batches = [driver.running[which].batch or () for driver in self.drivers]
        columns = [answer(column) for column in zip(*batches, strict=True)]
        return [[column[rank] for column in columns] for rank in range(len(batches))]
