"""BackwardPass: one backward of DistributedOptimizer."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from thinwire.adapters.fusion import FusionBuffer
from thinwire.adapters.plain import plain_mean
from thinwire.engine.moving import take_group
from thinwire.errors import UsageError
from thinwire.handle import Handle


class BackwardPass:
    """One backward: which buckets are full, started, done. Buckets start in one order on all ranks.

    Once the `handle` is closed they are averaged by the `group` itself.
    """

    def __init__(
        self, buffers: list[FusionBuffer], handle: Handle, group: dist.ProcessGroup
    ) -> None:
        self.buffers = buffers
        self.handle = handle
        self.group = group
        handle.movable(self._move)
        self.tasks: set[int] = set()
        """Autograd's numbers of the backwards that are running, nested ones included."""
        self.synchronising = False
        self._futures: list[Future[Tensor]] = []

    def _move(
        self, process_group: dist.ProcessGroup | None, model: nn.Module | None
    ) -> dist.ProcessGroup:
        self.group = take_group(process_group, model)
        return self.group

    def begin(self, synchronising: bool) -> None:
        self.synchronising = synchronising
        if self._futures and not self.handle.closed:
            # Of a backward that failed. Their exchanges write into the buckets that are filled now.
            self.handle.reducer.abandon()
        self._futures = []
        for buffer in self.buffers:
            buffer.reset()

    def arrived(self, buffer: FusionBuffer, index: int) -> None:
        """A gradient is complete; start every bucket whose turn has come."""
        if index not in buffer.missing:
            name = buffer.bucket.layout.slots[index].name
            raise UsageError(
                f"the gradient of {name!r} arrived twice in one backward: weights shared between reentrant checkpoints "
                "need use_reentrant=False, and a backward that failed needs zero_grad() before the next"
            )
        buffer.fill(index)
        while (
            len(self._futures) < len(self.buffers) and not self.buffers[len(self._futures)].missing
        ):
            self._start()

    def finish(self) -> Iterator[tuple[FusionBuffer, Tensor]]:
        """Start what is left, parameters without a gradient counting as zero; yield buckets as they complete."""
        while len(self._futures) < len(self.buffers):
            buffer = self.buffers[len(self._futures)]
            for index in sorted(buffer.missing):
                buffer.fill(index)
            self._start()
        for buffer, future in zip(self.buffers, self._futures, strict=True):
            yield buffer, future.wait()
        self._futures = []
        if not self.handle.closed:
            self.handle.reducer.end_backward()

    @property
    def incomplete(self) -> bool:
        return self.synchronising and any(buffer.missing for buffer in self.buffers)

    def _start(self) -> None:
        bucket = self.buffers[len(self._futures)].bucket
        if self.handle.closed:
            self._futures.append(plain_mean(bucket.flat, self.group))
            return
        reducer = self.handle.reducer
        self._futures.append(reducer.reduce(bucket))
        if len(self._futures) == len(self.buffers):
            reducer.flush()
