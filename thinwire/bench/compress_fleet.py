"""Fleet: the real reducers of several workers on one device, fed with random gradients; rank 0's work is timed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.bench.compress_gradients import Gradients
from thinwire.bench.compress_layout import lay_out_buckets
from thinwire.bench.compress_timing import Stopwatch
from thinwire.engine import Reducer, VirtualCluster, answer
from thinwire.exchange import Batch, Collective, Program
from thinwire.layout import Bucket, ParameterInfo
from thinwire.methods import Method

ENCODE = "encode"
DECODE = "decode"
MOMENTUM = 0.9
"""For methods that take it over from the optimizer."""


@dataclass
class RunningExchange:
    """One bucket's exchange on one worker; `batch` is what it waits for, None at its end."""

    program: Program[Tensor]
    batch: Batch | None = None

    def go_on(self, replies: Sequence[Any] | None) -> None:
        try:
            self.batch = next(self.program) if replies is None else self.program.send(replies)
        except StopIteration:
            self.batch = None


class Fleet:
    """All workers' reducers for one model under one method.

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
        parameters = {info.name: info for info in infos}
        self.drivers = VirtualCluster(world).drivers
        self.reducers = [
            Reducer(parameters, method, driver, device=device) for driver in self.drivers
        ]
        self._running: list[list[RunningExchange]] = [[] for _ in range(world)]
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
            for index, bucket in enumerate(buckets):
                self.gradients.fill(bucket.flat, self._step, rank, index)
        self._step += 1
        for rank in range(len(self.reducers)):
            with self._timed(watch, rank, ENCODE):
                self._encode(rank)
        first = [running.batch for running in self._running[0] if running.batch is not None]
        self.payload_bytes = sum(
            request.tensor.nbytes
            for batch in first
            for request in batch
            if isinstance(request, Collective)
        )
        while waiting := [
            index for index, running in enumerate(self._running[0]) if running.batch is not None
        ]:
            replies = {index: self._answer(index) for index in waiting}
            for rank, running in enumerate(self._running):
                with self._timed(watch, rank, DECODE):
                    for index in waiting:
                        running[index].go_on(replies[index][rank])
        for running in self._running:
            assert all(one.batch is None for one in running)
            running.clear()

    def _timed(self, watch: Stopwatch, rank: int, name: str) -> AbstractContextManager[None]:
        return watch.span(name) if rank == 0 else nullcontext()

    def _encode(self, rank: int) -> None:
        pending = self.drivers[rank].pending
        for bucket in self.buckets[rank]:
            future = self.reducers[rank].reduce(bucket)
            if not pending:
                future.wait()  # raises what went wrong
                raise AssertionError("a bucket was not started")
            program, _ = pending.pop()
            running = RunningExchange(program)
            running.go_on(None)
            self._running[rank].append(running)
        # Without it the next lap would begin with taking all of this back.
        self.reducers[rank].end_backward()

    def _answer(self, index: int) -> list[list[Any]]:
        """Per worker, the replies to what one bucket's programs ask for."""
        batches = [running[index].batch or () for running in self._running]
        columns = [answer(column) for column in zip(*batches, strict=True)]
        return [[column[rank] for column in columns] for rank in range(len(batches))]
