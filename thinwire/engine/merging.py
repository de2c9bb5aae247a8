"""BucketMerger: neighbouring buckets that are encoded together.

A bucket costs the host the same work however small it is: launches, a plan to run, a collective. Where backward's own
launches are what a step waits for, many small buckets cost more than what they send. So ready buckets wait for each other
until together they hold enough bytes, and then are one bucket to all that follows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.exchange.requests import Program
from thinwire.layout import Bucket, BucketLayout
from thinwire.observe.clock import Mark


@dataclass(frozen=True, eq=False)
class ReadyBucket:
    """A bucket that holds its gradient, and the future that gets it back with the update."""

    bucket: Bucket
    future: Future[Tensor]
    ready: Mark | None = None
    """When it held its gradient, if anybody looks."""
    exposed: Mark | None = None
    """The same, if the exposed time of its step is looked at."""


class BucketMerger:
    """Cuts a backward's buckets into units that are encoded together: neighbours, until they hold `enough` bytes of gradient.

    Near both ends of a backward half of that is enough. What comes first is sent early, so that the network has less left to
    do at the end; and the less comes last, the less of it is sent after the backward. The bucket with which the last of so many `parameters` comes is a unit by itself, because the step ends with it. What
    waits need not wait for it where the backward before says which one it is. That is so if both began with the same bucket:
    DDP has one bucket in its first backward, and others from the second on. Units do not depend on what is known, so that
    they are planned once. They are a function of sizes and order, which are the same on all ranks.

    In a quiet backward all units wait for its last bucket, so that it computes as if nothing were to be sent.
    """

    def __init__(self, enough: int, parameters: int, nbytes: int) -> None:
        self.enough = enough
        self._parameters = parameters
        self._total = nbytes
        """Bytes of all parameters."""
        self._waiting: list[ReadyBucket] = []
        self._nbytes = 0
        self._missing = parameters
        """Parameters that have not come in this backward."""
        self.quiet_backwards = 0
        """So many of the next backwards are quiet, on all ranks the same ones."""
        self._quiet = False
        """Whether this backward is, and nothing of it has gone on yet."""
        self._kept: list[list[ReadyBucket]] = []
        """Units of a quiet backward."""
        self._layouts: dict[BucketLayout, None] = {}
        """Of the buckets of this backward so far."""
        self._usual: list[BucketLayout] = []
        """Of the buckets of the last backward that came to its end."""
        self._joined: dict[tuple[BucketLayout, ...], BucketLayout] = {}
        """Layouts of buckets that are encoded as one, by the layouts they are made of."""

    def add(self, ready: ReadyBucket) -> list[list[ReadyBucket]]:
        """The units that go on now; none if this bucket waits for others."""
        if not self._layouts:
            self._quiet = self.quiet_backwards > 0
            self.quiet_backwards -= self._quiet
        self._layouts[ready.bucket.layout] = None
        units = self._cut(ready) if self.enough else [[ready]]
        if not self._quiet:
            return units
        self._kept += units
        return []

    def _cut(self, ready: ReadyBucket) -> list[list[ReadyBucket]]:
        """The units that this bucket completes."""
        self._missing -= len(ready.bucket.layout.slots)
        units = [] if self._missing else self._join_waiting()
        self._waiting.append(ready)
        self._nbytes += ready.bucket.flat.nbytes
        if not self._missing or self._nbytes >= self._limit() or self._last_is_next():
            units += self._join_waiting()
        return units

    def _limit(self) -> float:
        """Bytes that are enough here: half of what is behind or ahead, but between a half and all of `enough`.

        How far a backward has come is told by parameters. Bytes would say that an embedding is a long way, or the last
        layers of a network of convolutions.
        """
        share = min(self._missing, self._parameters - self._missing) / self._parameters
        return min(self.enough, max(self.enough, share * self._total) / 2)

    def _last_is_next(self) -> bool:
        count, usual = len(self._layouts), self._usual
        return count == len(usual) - 1 and usual[0] is next(iter(self._layouts))

    def _join_waiting(self) -> list[list[ReadyBucket]]:
        """All buckets that wait for others, as one unit."""
        waiting, self._waiting, self._nbytes = self._waiting, [], 0
        return [waiting] if waiting else []

    def take(self) -> list[list[ReadyBucket]]:
        """All that waits. What comes later in this backward goes on at once."""
        self._quiet = False
        kept, self._kept = self._kept, []
        return kept + self._join_waiting()

    def end(self) -> list[list[ReadyBucket]]:
        """The backward has ended: what waits."""
        self._usual = list(self._layouts)
        waiting = self.take()
        self.forget()
        return waiting

    def forget(self) -> list[list[ReadyBucket]]:
        """The backward is not to be learned from: what waits."""
        # One that was to be quiet, and failed, was no step.
        self.quiet_backwards += self._quiet
        self._layouts = {}
        self._missing = self._parameters
        return self.take()

    def has_seen(self, layout: BucketLayout) -> bool:
        """Whether a bucket of this layout has come: a second one belongs to another backward."""
        return layout in self._layouts

    def join(self, buckets: Sequence[ReadyBucket]) -> Bucket:
        """The buckets as one; of the same layout in every step, as long as they lie where they were."""
        key = tuple(ready.bucket.layout for ready in buckets)
        flat, buffers = span([ready.bucket.flat for ready in buckets])
        known = self._joined.get(key)
        if known is None or known.buffers != buffers:
            known = self._joined[key] = join(key, flat, buffers)
        return Bucket(known, flat)

    def keep(self, layouts: Container[BucketLayout]) -> None:
        """Forget all joined layouts but these."""
        self._joined = {key: one for key, one in self._joined.items() if one in layouts}


def fulfil(
    program: Program[Tensor], buckets: Sequence[ReadyBucket], after: Sequence[Callable[[], None]]
) -> Program[None]:
    """Run a program that delivers to these buckets, call what comes `after`, and hand the buckets back.

    All of it inside the program, where the driver's stream is the current one.
    """
    yield from program
    for call in after:
        call()
    for ready in buckets:
        ready.future.set_result(ready.bucket.flat)


def can_join(buckets: Sequence[Bucket]) -> bool:
    """Whether the buckets can be one: of one dtype, and all with something in them."""
    dtypes = {bucket.flat.dtype for bucket in buckets}
    return len(dtypes) == 1 and all(bucket.layout.slots for bucket in buckets)


Buffers = tuple[tuple[int, int], ...]
"""(where it begins, elements) of each bucket in the memory that spans them."""


def span(flats: Sequence[Tensor]) -> tuple[Tensor, Buffers]:
    """(memory from the first of some buckets to the end of the last, where they lie in it).

    What lies between two of them belongs to somebody else.
    """
    whole = memory_over(flats)
    first, size = whole.data_ptr(), whole.itemsize
    return whole, tuple(((flat.data_ptr() - first) // size, flat.numel()) for flat in flats)


def join(layouts: Sequence[BucketLayout], flat: Tensor, buffers: Buffers) -> BucketLayout:
    """The layout of buckets as one, whose slots lie where they are."""
    slots = tuple(
        slot.at(begin + slot.offset)
        for (begin, _), layout in zip(buffers, layouts, strict=True)
        for slot in layout.slots
    )
    return BucketLayout(slots, flat.numel(), flat.dtype, flat.device, buffers)


def memory_over(flats: Sequence[Tensor]) -> Tensor:
    """A tensor from the first of some tensors in memory to the end of the last. They have to outlive it."""
    first, dtype = flats[0], flats[0].dtype
    begin = min(flat.data_ptr() for flat in flats)
    nbytes = max(flat.data_ptr() + flat.nbytes for flat in flats) - begin
    if first.device.type == "cpu":
        raw = (ctypes.c_uint8 * nbytes).from_address(begin)
        return torch.frombuffer(raw, dtype=dtype)
    storage = torch._C._construct_storage_from_data_pointer(begin, first.device, nbytes)
    whole = torch.empty(0, dtype=dtype, device=first.device)
    return whole.set_(storage, 0, (nbytes // dtype.itemsize,), (1,))
