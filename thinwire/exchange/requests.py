"""What an exchange may ask of the network. An exchange yields batches of these and never calls
torch.distributed itself, so the same code runs on gloo, on NCCL and on virtual ranks in one process."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Request:
    """One collective. `control_bytes` of this rank's tensor are counts, flags and padding, not gradient."""

    tensor: Tensor
    phase: str = ""
    control_bytes: int = 0

    kind: ClassVar[str] = ""

    def sent_bytes(self, world: int) -> int:
        """Bytes this rank puts on the wire under a bandwidth-optimal algorithm."""
        raise NotImplementedError

    def control_share(self, world: int) -> int:
        """The part of `sent_bytes` that is control."""
        if not self.tensor.numel():
            return 0
        return self.sent_bytes(world) * self.control_bytes // self.tensor.nbytes


@dataclass(frozen=True, eq=False)
class AllReduce(Request):
    """Sum over ranks; the reply is the summed tensor (the same storage where the backend works in place)."""

    kind: ClassVar[str] = "all_reduce"

    def sent_bytes(self, world: int) -> int:
        return 2 * (world - 1) * self.tensor.nbytes // world


@dataclass(frozen=True, eq=False)
class AllGather(Request):
    """Every rank's 1-D tensor, all of one size; the reply is [world, n]."""

    kind: ClassVar[str] = "all_gather"

    def sent_bytes(self, world: int) -> int:
        return (world - 1) * self.tensor.nbytes


@dataclass(frozen=True, eq=False)
class AllToAll(Request):
    """[world, n]: row p goes to rank p; the reply's row p came from rank p."""

    kind: ClassVar[str] = "all_to_all"

    def sent_bytes(self, world: int) -> int:
        return (world - 1) * self.tensor.nbytes // world


Batch = tuple[Request, ...]
Replies = Sequence[Tensor]
Program = Generator[Batch, Replies, T]


@dataclass(frozen=True)
class Place:
    """Who I am among how many."""

    rank: int
    world: int


def together(programs: Sequence[Program[Any]]) -> Program[list[Any]]:
    """Run several programs side by side: what they ask for in the same round travels as one batch."""
    results: list[Any] = [None] * len(programs)
    asked: dict[int, Batch] = {}
    for which, program in enumerate(programs):
        _advance(which, program, None, asked, results)
    while asked:
        order = list(asked)
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
