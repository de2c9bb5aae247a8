"""What an exchange may ask for. An exchange yields batches of these and never calls torch.distributed itself, so that
the same code runs on gloo, on NCCL and on virtual ranks in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from thinwire.described import Described

T = TypeVar("T")

EVERYONE = "everyone"
INSIDE = "inside"
BETWEEN = "between"


@dataclass(frozen=True, eq=False)
class Request(Described):
    """What a program waits for. The reply to a collective is a tensor."""

    _: KW_ONLY
    scope: str = EVERYONE
    """Who takes part: everyone, the ranks of this host (`INSIDE`), or one rank of every host (`BETWEEN`)."""

    kind: ClassVar[str] = ""

    def sent_bytes(self, world: int) -> int:
        """Bytes this rank puts on the wire under a bandwidth-optimal algorithm."""
        return 0


@dataclass(frozen=True, eq=False)
class Common(Request):
    """The reply is what `make` returns, the same on every rank and only read. Nothing travels.

    A real rank computes it for itself. Of virtual ranks in one process the first computes it for all.
    """

    make: Callable[[], Any]
    """Computes the reply."""

    kind: ClassVar[str] = "common"


@dataclass(frozen=True, eq=False)
class Collective(Request):
    """A request that travels."""

    tensor: Tensor
    """What this rank brings."""
    phase: str = ""
    """The name under which its bytes are counted."""
    _: KW_ONLY
    control_bytes: int = 0
    """How many of the tensor's bytes are counts and flags instead of gradient."""
    padding_bytes: int | Tensor = 0
    """How many fill places that no entry took. A tensor where only the device knows; it is read with the ledger."""

    def received_bytes(self, world: int) -> int:
        """Bytes this rank takes off the wire under the same algorithm."""
        return self.sent_bytes(world)

    def control_share(self, world: int) -> int:
        """The part of `sent_bytes` that is control."""
        return self._share(world, self.control_bytes)

    def padding_share(self, world: int) -> int | Tensor:
        """The part of `sent_bytes` that fills unused places."""
        if isinstance(self.padding_bytes, int):
            return self._share(world, self.padding_bytes)
        return self.padding_bytes * (self.sent_bytes(world) / max(1, self.tensor.nbytes))

    def _share(self, world: int, part: int) -> int:
        if not self.tensor.numel():
            return 0
        return self.sent_bytes(world) * part // self.tensor.nbytes


@dataclass(frozen=True, eq=False)
class Sum(Collective):
    """Sum over ranks, an all-reduce; the reply is the summed tensor (the same storage where the backend works in place)."""

    kind: ClassVar[str] = "all_reduce"

    def sent_bytes(self, world: int) -> int:
        return 2 * (world - 1) * self.tensor.nbytes // world


@dataclass(frozen=True, eq=False)
class Gather(Collective):
    """Every rank's 1-D tensor, all of one size, an all-gather; the reply is [world, n]."""

    _: KW_ONLY
    apart: bool = False
    """Whether the reply's rows may lie apart in memory, so that others can share the collective."""

    kind: ClassVar[str] = "all_gather"

    def sent_bytes(self, world: int) -> int:
        return (world - 1) * self.tensor.nbytes


@dataclass(frozen=True, eq=False)
class AllToAll(Collective):
    """[world, n]: row p goes to rank p; the reply's row p came from rank p."""

    _: KW_ONLY
    apart: bool = False
    """Whether the reply's rows may lie apart in memory, so that others can share the collective."""

    kind: ClassVar[str] = "all_to_all"

    def sent_bytes(self, world: int) -> int:
        return (world - 1) * self.tensor.nbytes // world


@dataclass(frozen=True, eq=False)
class AllToAllUneven(Collective):
    """[sum(send), ...]: the first send[0] rows go to rank 0 and so on; the reply has sum(receive) rows, by source."""

    _: KW_ONLY
    send: tuple[int, ...]
    """Rows for each rank."""
    receive: tuple[int, ...]
    """Rows from each rank."""
    rank: int
    """This one."""

    kind: ClassVar[str] = "all_to_all_uneven"

    def sent_bytes(self, world: int) -> int:
        return self._row_bytes() * (sum(self.send) - self.send[self.rank])

    def received_bytes(self, world: int) -> int:
        return self._row_bytes() * (sum(self.receive) - self.receive[self.rank])

    def _row_bytes(self) -> int:
        return math.prod(self.tensor.shape[1:]) * self.tensor.element_size()


@dataclass(frozen=True, eq=False)
class Broadcast(Collective):
    """The reply is `source`'s tensor; everybody passes one of the same size."""

    _: KW_ONLY
    source: int
    """Whose tensor counts."""

    kind: ClassVar[str] = "broadcast"

    def sent_bytes(self, world: int) -> int:
        return self.tensor.nbytes


@dataclass(frozen=True, eq=False)
class Swap(Collective):
    """Send the tensor to rank `to` and receive one of the same size from rank `source`; None = not this time.

    The reply is what arrived, or an empty tensor.
    """

    _: KW_ONLY
    to: int | None
    """Who gets the tensor."""
    source: int | None
    """Whose tensor arrives."""
    pattern: str = ""
    """Swaps of one name have the same partners as each other, on every rank, so that they can travel as one. Without a name one
    travels alone."""

    kind: ClassVar[str] = "swap"

    def sent_bytes(self, world: int) -> int:
        return 0 if self.to is None else self.tensor.nbytes

    def received_bytes(self, world: int) -> int:
        return 0 if self.source is None else self.tensor.nbytes


Batch = tuple[Request, ...]
Replies = Sequence[Any]
Program = Generator[Batch, Replies, T]
"""Yields what it asks for, is sent the replies, and returns its result."""


@dataclass(frozen=True)
class Place(Described):
    """Who I am among how many."""

    rank: int
    """From 0."""
    world: int
    """How many ranks there are."""


def together(programs: Sequence[Program[Any]]) -> Program[list[Any]]:
    """Run several programs side by side: what they ask for in the same round travels as one batch."""
    results: list[Any] = [None] * len(programs)
    asked: dict[int, Batch] = {}
    for index, program in enumerate(programs):
        _advance(index, program, None, asked, results)
    while asked:
        order = sorted(asked)
        replies = yield tuple(request for index in order for request in asked[index])
        taken = 0
        for index in order:
            count = len(asked.pop(index))
            _advance(index, programs[index], replies[taken : taken + count], asked, results)
            taken += count
    return results


def _advance(
    index: int,
    program: Program[Any],
    replies: Replies | None,
    asked: dict[int, Batch],
    results: list[Any],
) -> None:
    try:
        asked[index] = next(program) if replies is None else program.send(replies)
    except StopIteration as finished:
        results[index] = finished.value


def begin_now(program: Program[T]) -> Program[T]:
    """Run a program up to its first request; the rest of it, beginning with that request.

    What a program does before its first request is then done when it is made, not when a driver starts it.
    """
    try:
        batch = next(program)
    except StopIteration as finished:
        return _finished(finished.value)
    return _go_on(program, batch)


def _finished(result: T) -> Program[T]:
    yield from ()
    return result


def _go_on(program: Program[T], batch: Batch) -> Program[T]:
    try:
        while True:
            batch = program.send((yield batch))
    except StopIteration as finished:
        return finished.value


def common(make: Callable[[], T], scope: str = EVERYONE) -> Program[T]:
    """What `make` returns, the same on every rank of `scope`: see `Common`."""
    (result,) = yield (Common(make, scope=scope),)
    return result


def rescoped(program: Program[T], scope: str) -> Program[T]:
    """The same program, asked of the ranks of another scope."""
    try:
        batch = next(program)
        while True:
            batch = program.send((yield tuple(replace(one, scope=scope) for one in batch)))
    except StopIteration as finished:
        return finished.value
