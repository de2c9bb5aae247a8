"""What an exchange may ask of the network. An exchange yields batches of these and never calls
torch.distributed itself, so the same code runs on gloo, on NCCL and on virtual ranks in one process."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor

T = TypeVar("T")

EVERYONE = "everyone"
INSIDE = "inside"
BETWEEN = "between"


@dataclass(frozen=True, eq=False)
class Request:
    """One collective. Of this rank's tensor `control_bytes` are counts, flags and histograms and `padding_bytes` fill
    places that no entry took; the rest is gradient."""

    tensor: Tensor
    phase: str = ""
    control_bytes: int = 0
    padding_bytes: int | Tensor = 0
    """A tensor where only the device knows it; it is read when somebody asks for the ledger."""
    scope: str = EVERYONE
    """Who takes part: everyone, the ranks of this host (`INSIDE`), or one rank of every host (`BETWEEN`)."""

    kind: ClassVar[str] = ""

    def sent_bytes(self, world: int) -> int:
        """Bytes this rank puts on the wire under a bandwidth-optimal algorithm."""
        raise NotImplementedError

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
class AllReduce(Request):
    """Sum over ranks; the reply is the summed tensor (the same storage where the backend works in place)."""

    kind: ClassVar[str] = "all_reduce"

    def sent_bytes(self, world: int) -> int:
        return 2 * (world - 1) * self.tensor.nbytes // world


@dataclass(frozen=True, eq=False)
class AllGather(Request):
    """Every rank's 1-D tensor, all of one size; the reply is [world, n]."""

    apart: bool = False
    """Whether the reply's rows may lie apart in memory, so that others can share the collective."""

    kind: ClassVar[str] = "all_gather"

    def sent_bytes(self, world: int) -> int:
        return (world - 1) * self.tensor.nbytes


@dataclass(frozen=True, eq=False)
class AllToAll(Request):
    """[world, n]: row p goes to rank p; the reply's row p came from rank p."""

    kind: ClassVar[str] = "all_to_all"

    def sent_bytes(self, world: int) -> int:
        return (world - 1) * self.tensor.nbytes // world


@dataclass(frozen=True, eq=False)
class AllToAllUneven(Request):
    """[sum(send), ...]: the first send[0] rows go to rank 0 and so on; the reply has sum(receive) rows, by source."""

    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()
    rank: int = 0

    kind: ClassVar[str] = "all_to_all_uneven"

    def sent_bytes(self, world: int) -> int:
        return self._row_bytes() * (sum(self.send) - self.send[self.rank])

    def received_bytes(self, world: int) -> int:
        return self._row_bytes() * (sum(self.receive) - self.receive[self.rank])

    def _row_bytes(self) -> int:
        return math.prod(self.tensor.shape[1:]) * self.tensor.element_size()


@dataclass(frozen=True, eq=False)
class Broadcast(Request):
    """The reply is `source`'s tensor; everybody passes one of the same size."""

    source: int = 0

    kind: ClassVar[str] = "broadcast"

    def sent_bytes(self, world: int) -> int:
        return self.tensor.nbytes


@dataclass(frozen=True, eq=False)
class Swap(Request):
    """Send the tensor to rank `to` and receive one of the same size from rank `source`; None = not this time.

    The reply is what arrived, or an empty tensor.
    """

    to: int | None = None
    source: int | None = None

    kind: ClassVar[str] = "swap"

    def sent_bytes(self, world: int) -> int:
        return 0 if self.to is None else self.tensor.nbytes

    def received_bytes(self, world: int) -> int:
        return 0 if self.source is None else self.tensor.nbytes


Batch = tuple[Request, ...]
Replies = Sequence[Tensor]
Program = Generator[Batch, Replies, T]


@dataclass(frozen=True)
class Place:
    """Who I am among how many."""

    rank: int
    world: int


def together(programs: Sequence[Program[Any]]) -> Program[list[Any]]:
    """Run several programs side by side: what they ask for in the same round travels as one batch.

    An empty batch only waits for virtual ranks to come to the same line. Nobody else goes on meanwhile, so that the
    rounds that travel are those of real ranks.
    """
    results: list[Any] = [None] * len(programs)
    asked: dict[int, Batch] = {}
    for which, program in enumerate(programs):
        _advance(which, program, None, asked, results)
    while asked:
        order = sorted(which for which, batch in asked.items() if not batch) or sorted(asked)
        replies = yield tuple(request for which in order for request in asked[which])
        taken = 0
        for which in order:
            count = len(asked.pop(which))
            _advance(which, programs[which], replies[taken : taken + count], asked, results)
            taken += count
    return results


def _advance(
    which: int,
    program: Program[Any],
    replies: Replies | None,
    asked: dict[int, Batch],
    results: list[Any],
) -> None:
    try:
        asked[which] = next(program) if replies is None else program.send(replies)
    except StopIteration as finished:
        results[which] = finished.value
