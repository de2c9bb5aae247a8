"""Checksums: what arrives is what was sent, or no rank uses it.

Without them a bit that flips on its way is applied. Where one receiver alone got it, its replica differs from then on; where it
decides how much is sent next, ranks wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.engine.fusing import by_owners
from thinwire.errors import DamageError
from thinwire.exchange.requests import (
    AllToAll,
    AllToAllUneven,
    Batch,
    Broadcast,
    Collective,
    Gather,
    Place,
    Program,
    Request,
    Swap,
)
from thinwire.kernels.fingerprint import row_fingerprints

T = TypeVar("T")

PHASE = "checksum"
UNHARMED, DAMAGED = 0, -1
"""Every bit of a word says the same, so that one that is damaged itself is understood."""


def checked(program: Program[T], place_of: Callable[[str], Place]) -> Program[T]:
    """The same program, in which no rank goes on with a message that is not what its sender had.

    1. Sums are made by owners, because nobody can check a sum. Their bytes are the same.
    2. With every batch each rank gathers the fingerprints of all messages that were sent.
    3. What arrived is compared with them, and the ranks agree by one more small collective. If anything differs anywhere,
       all of them raise.

    `place_of` says who this rank is in a scope.
    """
    owned = by_owners(program, lambda scope: place_of(scope).world, lambda request: True)
    try:
        batch = next(owned)
        while True:
            replies = yield from _perform(batch, place_of)
            batch = owned.send(replies)
    except StopIteration as finished:
        return finished.value


def _perform(batch: Batch, place_of: Callable[[str], Place]) -> Program[list[Any]]:
    checks = [one for scope in _scopes(batch) for one in _checks_of(scope, batch, place_of(scope))]
    if not checks:
        return list((yield batch))
    requests = tuple(check.request for check in checks)
    replies = yield (*batch, *requests)
    own, said = replies[: len(batch)], replies[len(batch) :]
    faults = [f for check, words in zip(checks, said, strict=True) for f in check.find(own, words)]
    device = requests[0].tensor.device
    verdict = torch.tensor([DAMAGED if faults else UNHARMED, *(faults or [(0, 0)])[0]])
    agreement = Gather(verdict.to(device), PHASE, control_bytes=verdict.nbytes)
    (verdicts,) = yield (agreement,)
    for rank, (word, source, index) in enumerate(verdicts.tolist()):
        if (word & (2**64 - 1)).bit_count() > 32:
            phase = getattr(batch[min(max(index, 0), len(batch) - 1)], "phase", "")
            raise DamageError(
                f"a message of {phase} from rank {source} was damaged before rank {rank} read it; no rank has used it, so the step "
                "can be dropped and training can go on"
            )
    return list(own)


def _scopes(batch: Batch) -> list[str]:
    return list(dict.fromkeys(one.scope for one in batch if isinstance(one, Collective)))


@dataclass(frozen=True, eq=False)
class Check:
    """The requests of one scope in a batch, and the gathering of their fingerprints."""

    members: Sequence[tuple[int, Collective]]
    """Places in the batch, and what was asked for."""
    place: Place
    request: Gather

    def find(self, replies: Sequence[Any], said: Tensor) -> list[tuple[int, int]]:
        """(source, place in the batch) of every message that is not what was sent. The host waits for what has arrived."""
        begin, arrived, sources = 0, [], []
        for index, request in self.members:
            got, words = _arrived(request, replies[index], self.place)
            arrived.append(_prints(got, said.device))
            sources += [(source, begin + word, index) for source, word in words]
            begin += _message_count(request, self.place.world)
        if not sources:
            return []
        rows = torch.tensor([source for source, _, _ in sources], device=said.device)
        columns = torch.tensor([column for _, column, _ in sources], device=said.device)
        differs = (said[rows, columns] != torch.cat(arrived)).tolist()
        return [
            (source, index) for (source, _, index), one in zip(sources, differs, strict=True) if one
        ]


def _checks_of(scope: str, batch: Batch, place: Place) -> Iterator[Check]:
    members = [
        (index, one)
        for index, one in enumerate(batch)
        if isinstance(one, Collective) and one.scope == scope
    ]
    if place.world == 1:
        return
    device = members[0][1].tensor.device
    words = torch.cat([_prints(_sent(one), device) for _, one in members])
    request = Gather(words, PHASE, scope=scope, control_bytes=words.nbytes)
    yield Check(members, place, request)


def _prints(messages: Tensor | Sequence[Tensor], device: torch.device) -> Tensor:
    """int64: of messages of one length, the rows of a matrix, or of several lengths."""
    if isinstance(messages, Tensor):
        return row_fingerprints(messages)
    if not messages:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return torch.cat([row_fingerprints(one.reshape(1, -1)) for one in messages])


def _message_count(request: Request, world: int) -> int:
    return world if isinstance(request, AllToAll | AllToAllUneven) else 1


def _sent(request: Collective) -> Tensor | Sequence[Tensor]:
    """The messages that a rank sends: one for everybody, or one for each rank."""
    match request:
        case AllToAll():
            return request.tensor.reshape(request.tensor.shape[0], -1)
        case AllToAllUneven(send=send):
            return request.tensor.split(list(send))
    return request.tensor.reshape(1, -1)


def _arrived(
    request: Collective, reply: Tensor, place: Place
) -> tuple[Tensor | Sequence[Tensor], list[tuple[int, int]]]:
    """(the messages that a rank received, from whom each, and which of its sender's messages it is)."""
    ranks = range(place.world)
    match request:
        case Gather():
            return reply, [(source, 0) for source in ranks]
        case AllToAll():
            return reply.reshape(place.world, -1), [(source, place.rank) for source in ranks]
        case AllToAllUneven(receive=receive):
            return reply.split(list(receive)), [(source, place.rank) for source in ranks]
        case Broadcast(source=source):
            return reply.reshape(1, -1), [(source, 0)]
        case Swap(source=None):
            return [], []
        case Swap(source=int(source)):
            return reply.reshape(1, -1), [(source, 0)]
    raise AssertionError(f"{request.kind} is not a request that can be checked")
