"""Virtual ranks: all ranks of a group inside one process, run in lockstep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.engine.drivers import Driver
from thinwire.errors import ExchangeError, UsageError
from thinwire.exchange.requests import (
    BETWEEN,
    EVERYONE,
    INSIDE,
    AllToAll,
    AllToAllUneven,
    Batch,
    Broadcast,
    Collective,
    Common,
    Gather,
    Place,
    Program,
    Request,
    Sum,
    Swap,
)
from thinwire.observe.ledger import Ledger

T = TypeVar("T")


class VirtualRanks:
    """Runs the programs of all ranks, and keeps the ledger of each."""

    def __init__(
        self, world: int, ledgers: Sequence[Ledger] = (), *, per_host: int | None = None
    ) -> None:
        """With `per_host` the ranks are placed on hosts of that many, for requests inside and between hosts."""
        self.world = world
        self.ledgers = list(ledgers)
        everyone = list(range(world))
        self.teams = {EVERYONE: [everyone]}
        if per_host is not None:
            self.add_hosts(per_host)

    def add_hosts(self, per_host: int) -> None:
        if self.world % per_host:
            raise UsageError(
                f"per_host is {per_host}; it must divide the number of ranks, {self.world}"
            )
        everyone = list(range(self.world))
        hosts = [everyone[start : start + per_host] for start in range(0, self.world, per_host)]
        self.teams[INSIDE] = hosts
        self.teams[BETWEEN] = [list(team) for team in zip(*hosts, strict=True)]

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """The results of all ranks; rank order is the order of `programs`."""
        results: list[Any] = [None] * self.world
        batches = [_step(program, None, results, rank) for rank, program in enumerate(programs)]
        while any(batch is not None for batch in batches):
            replies = self._perform(batches)
            batches = [
                _step(program, replies[rank], results, rank)
                for rank, program in enumerate(programs)
            ]
        return results

    def _perform(self, batches: Sequence[Batch | None]) -> list[list[Any]]:
        lengths = {None if batch is None else len(batch) for batch in batches}
        if len(lengths) != 1 or None in lengths:
            raise ExchangeError("virtual ranks disagree about the number of requests in this round")
        columns = list(zip(*(batch for batch in batches if batch is not None), strict=True))
        replies: list[list[Any]] = [[] for _ in batches]
        for column in columns:
            for team in self._teams(column):
                members = [column[rank] for rank in team]
                for rank, reply in zip(team, answer(members), strict=True):
                    replies[rank].append(reply)
                for rank, ledger in enumerate(self.ledgers):
                    if rank in team:
                        ledger.record(column[rank], 0.0, len(team))
        return replies

    def _teams(self, column: Sequence[Request]) -> list[list[int]]:
        scopes = {request.scope for request in column}
        if len(scopes) != 1 or not scopes <= self.teams.keys():
            raise ExchangeError(f"virtual ranks asked for the scopes {sorted(scopes)} in one round")
        return self.teams[scopes.pop()]


class VirtualRank(Driver):
    """The driver of one virtual rank: keeps its programs until those of all ranks are there to be run."""

    def __init__(self, rank: int, ranks: VirtualRanks, ledger: Ledger) -> None:
        self.place = Place(rank, ranks.world)
        self.ledger = ledger
        self.pending: list[tuple[Program[Any], Future[Any]]] = []
        self._ranks = ranks

    def place_of(self, scope: str) -> Place:
        team = next(team for team in self._ranks.teams[scope] if self.place.rank in team)
        return Place(team.index(self.place.rank), len(team))

    def add_hosts(self, per_host: int) -> None:
        self._ranks.add_hosts(per_host)

    def start(
        self, program: Program[Any], future: Future[Any] | None = None, what: str = ""
    ) -> Future[Any]:
        future = self.new_future() if future is None else future
        self.pending.append((program, future))
        return future


class VirtualCluster:
    """As many virtual ranks as a group has, each with a driver and a ledger of its own."""

    def __init__(self, world: int, *, per_host: int | None = None) -> None:
        ledgers = [Ledger(world) for _ in range(world)]
        self._ranks = VirtualRanks(world, ledgers, per_host=per_host)
        self.drivers = [VirtualRank(rank, self._ranks, ledgers[rank]) for rank in range(world)]

    def run(self) -> None:
        """Run what all ranks have started, first in, first out, and fulfil their futures."""
        while any(driver.pending for driver in self.drivers):
            turn = [driver.pending.pop(0) for driver in self.drivers]
            results = self._ranks.run([program for program, _ in turn])
            for (_, future), result in zip(turn, results, strict=True):
                future.set_result(result)


def run_virtual(
    programs: Sequence[Program[T]],
    ledger: Ledger | Sequence[Ledger] | None = None,
    *,
    per_host: int | None = None,
) -> list[T]:
    """Run the programs of all ranks in lockstep; `ledger` counts what rank 0 sends, a list of ledgers what every rank sends."""
    ledgers = [ledger] if isinstance(ledger, Ledger) else list(ledger or [])
    return VirtualRanks(len(programs), ledgers, per_host=per_host).run(programs)


def _step(
    program: Program[Any], replies: list[Any] | None, results: list[Any], rank: int
) -> Batch | None:
    try:
        return next(program) if replies is None else program.send(replies)
    except StopIteration as finished:
        results[rank] = finished.value
        return None


def answer(column: Sequence[Request]) -> list[Any]:
    """The replies of all ranks of a team to one request."""
    described = {_description(request) for request in column}
    if len(described) != 1:
        raise ExchangeError(
            f"virtual ranks asked for different collectives: {sorted(map(str, described))}"
        )
    first = column[0]
    if isinstance(first, Common):
        return [first.make()] * len(column)
    tensors = [request.tensor for request in column if isinstance(request, Collective)]
    match first:
        case Sum():
            total = tensors[0].clone()
            for tensor in tensors[1:]:
                total += tensor
            return [total.clone() for _ in tensors]
        case Gather():
            # One copy for all: what was gathered is only read.
            return [torch.stack(tensors)] * len(tensors)
        case AllToAll():
            # One copy for all: a reply's row is only read.
            crossed = torch.stack(tensors).transpose(0, 1).contiguous()
            return list(crossed.unbind(0))
        case AllToAllUneven():
            return _cross_uneven(column)
        case Broadcast(source=source):
            return [tensors[source].clone() for _ in tensors]
        case Swap():
            return _deliver_swaps(column)
    raise ExchangeError(f"unknown request {first.kind!r}")


def _description(request: Request) -> tuple[Any, ...]:
    """What all ranks must agree on."""
    if not isinstance(request, Collective):
        return (request.kind,)
    shape = tuple(request.tensor.shape)
    if isinstance(request, AllToAllUneven):
        shape = shape[1:]
    source = request.source if isinstance(request, Broadcast) else None
    return request.kind, request.phase, request.tensor.dtype, shape, source


def _cross_uneven(column: Sequence[Request]) -> list[Tensor]:
    pieces = []
    for request in column:
        assert isinstance(request, AllToAllUneven)
        pieces.append(request.tensor.split(list(request.send)))
    replies = []
    for rank, request in enumerate(column):
        assert isinstance(request, AllToAllUneven)
        arrived = [piece[rank] for piece in pieces]
        if tuple(map(len, arrived)) != request.receive:
            raise ExchangeError(
                f"virtual rank {rank} expects {request.receive} rows and is sent {tuple(map(len, arrived))}"
            )
        replies.append(torch.cat(arrived))
    return replies


def _deliver_swaps(column: Sequence[Request]) -> list[Tensor]:
    replies = []
    for rank, request in enumerate(column):
        assert isinstance(request, Swap)
        if request.source is None:
            replies.append(request.tensor.new_empty(0))
            continue
        other = column[request.source]
        assert isinstance(other, Swap)
        if other.to != rank:
            raise ExchangeError(
                f"virtual rank {rank} waits for rank {request.source}, which sends to {other.to}"
            )
        replies.append(other.tensor.clone())
    return replies
