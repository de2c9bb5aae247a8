"""Lockstep: what virtual ranks in one process can share.

They hold the same replies, so what all of them compute from one alike is computed once (`alike`); and what each computes
from its own numbers can be one operation on the stacked numbers of a whole team (`jointly`). Without the first N ranks
that gather would decode N payloads each; without the second a small model would wait for N times as many launches.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from torch import Tensor

from thinwire.exchange.requests import Batch, Place, Program, Replies

M = TypeVar("M")
T = TypeVar("T")

TeamProgram = Generator[Sequence[Batch], Sequence[Replies], T]
"""A program of several ranks at once: yields a batch and receives replies for each of them."""

_found: ContextVar[dict[int, tuple[Tensor, Any]] | None] = ContextVar("found", default=None)
"""By the reply's id, with the reply, which keeps the id its own; None outside of a round of virtual ranks."""
_hall: ContextVar[list[Team[Any, Any]] | None] = ContextVar("hall", default=None)
"""Teams that are not complete yet; None where ranks do not form any."""


# -- the same replies -----------------------------------------------------------------------------------------------


@contextmanager
def one_round() -> Iterator[None]:
    """All ranks go on from one set of replies."""
    token = _found.set({})
    try:
        yield
    finally:
        _found.reset(token)


def alike(reply: Tensor, make: Callable[[], T]) -> T:
    """What `make` computes from a reply, the same on every rank that has it; the caller must not write to it.

    At most one such result per reply. A real rank computes it for itself.
    """
    found = _found.get()
    if found is None:
        return make()
    if id(reply) not in found:
        found[id(reply)] = (reply, make())
    return found[id(reply)][1]


# -- one program for several ranks ----------------------------------------------------------------------------------


@contextmanager
def in_teams() -> Iterator[None]:
    """Virtual ranks that are run inside work together wherever their programs can; nothing else changes."""
    token = _hall.set([])
    try:
        yield
    finally:
        _hall.reset(token)


def jointly(
    member: M,
    place: Place,
    purpose: Hashable,
    most: int,
    run: Callable[[Sequence[M]], TeamProgram[Sequence[T]]],
) -> Program[T]:
    """Run `run` for this rank alone or, in lockstep with others, once for up to `most` neighbouring ranks.

    All ranks call it with the same `purpose`, which tells it from what else they begin in the same round. `run` gets
    the members by rising rank and returns one result for each.

    1. Join a team, and wait until everybody has.
    2. The first to go on runs the team's program up to its next requests.
    3. Each makes its own request, leaves the replies with the team, and waits until everybody has.
    """
    hall = _hall.get()
    if hall is None:
        return (yield from alone(run([member])))
    team: Team[M, T] = find_team(hall, place, purpose, most, run)
    seat = team.join(member, place)
    # A round without a request: all ranks get here before any goes on.
    yield ()
    while (batch := team.take(seat)) is not None:
        team.replies[seat] = yield batch
        yield ()
    assert team.results is not None
    return team.results[seat]


def alone(program: TeamProgram[Sequence[T]]) -> Program[T]:
    """A team of one."""
    try:
        (batch,) = next(program)
        while True:
            (batch,) = program.send([(yield batch)])
    except StopIteration as finished:
        (result,) = finished.value
        return result


def abreast(programs: Sequence[Program[T]]) -> TeamProgram[Sequence[T]]:
    """Programs of single ranks, all of which ask for the same, as one of a team."""
    results: list[T] = []
    replies: Sequence[Replies | None] = [None] * len(programs)
    while not results:
        batches = []
        for program, reply in zip(programs, replies, strict=True):
            try:
                batches.append(next(program) if reply is None else program.send(reply))
            except StopIteration as finished:
                results.append(finished.value)
        if batches:
            replies = yield batches
    return results


class Team(Generic[M, T]):
    """Ranks that share one program, and what is on its way between it and them."""

    def __init__(
        self,
        world: int,
        purpose: Hashable,
        most: int,
        run: Callable[[Sequence[M]], TeamProgram[Sequence[T]]],
    ) -> None:
        self.world = world
        self.purpose = purpose
        self.most = most
        self.ranks: list[int] = []
        self.members: list[M] = []
        self.replies: dict[int, Replies] = {}
        self.results: Sequence[T] | None = None
        self._run = run
        self._program: TeamProgram[Sequence[T]] | None = None
        self._batches: dict[int, Batch | None] = {}
        """By seat: what its rank has not taken yet."""

    @property
    def complete(self) -> bool:
        return self._program is not None or len(self.members) == self.most

    def is_next(self, place: Place, purpose: Hashable) -> bool:
        """Whether the team waits for this rank: it stands on neighbouring ones."""
        return (
            not self.complete
            and (self.world, self.purpose) == (place.world, purpose)
            and self.ranks[-1] + 1 == place.rank
        )

    def join(self, member: M, place: Place) -> int:
        """The member's seat."""
        self.ranks.append(place.rank)
        self.members.append(member)
        return len(self.members) - 1

    def take(self, seat: int) -> Batch | None:
        """What a member asks for next, None if all is done."""
        if seat not in self._batches:
            self._go_on()
        return self._batches.pop(seat)

    def _go_on(self) -> None:
        seats = range(len(self.members))
        try:
            if self._program is None:
                self._program = self._run(self.members)
                batches = next(self._program)
            else:
                replies = [self.replies.pop(seat) for seat in seats]
                batches = self._program.send(replies)
            self._batches = dict(zip(seats, batches, strict=True))
        except StopIteration as finished:
            self.results = finished.value
            self._batches = dict.fromkeys(seats)


def find_team(
    hall: list[Team[Any, Any]],
    place: Place,
    purpose: Hashable,
    most: int,
    run: Callable[[Sequence[M]], TeamProgram[Sequence[T]]],
) -> Team[M, T]:
    """The team that waits for this rank, or a new one."""
    for team in hall:
        if team.is_next(place, purpose):
            return team
    hall[:] = [team for team in hall if not team.complete]
    hall.append(Team(place.world, purpose, most, run))
    return hall[-1]
