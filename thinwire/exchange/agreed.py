"""Exchanges that first agree on the places and then add the values there: an all-reduce without indices.

Every rank contributes its whole compensated gradient at the agreed places and clears it there, so nothing has to be
intersected, and no rank's contribution at a chosen place waits.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from thinwire.exchange.base import Exchange, Offer, Outcome
from thinwire.exchange.common import (
    INDEX_DTYPE,
    NO_ENTRY,
    any_non_finite,
    ask,
    count_by_slot,
    deliver_mean,
    flags_request,
    keep_alone,
    read_flags,
    slot_of,
    to_wire,
    travelling,
    wire_dtype,
)
from thinwire.exchange.requests import Broadcast, Program, Sum, together
from thinwire.exchange.sums import sum_by_owners
from thinwire.select.base import Picks

AGREED_PLACES = "places that all ranks agree on, and the sums there"
"""The form of `AgreedPlaces` without a state, whose `agree` asks an offer for c, its flags, its `pick` and its `pick_on` and writes
nothing off."""


Told = tuple[Tensor, Tensor]
"""bool [slots]: some rank had a gradient; bool []: something was not finite somewhere."""


class AgreedPlaces(Exchange):
    """1. Agree on places.  2. Add everybody's values there.  3. Every rank clears what it contributed."""

    form = AGREED_PLACES
    sums_on_the_way = True
    offers_all = False

    def run(self, offer: Offer) -> Program[Outcome]:
        if offer.place.world == 1:
            return keep_alone(offer)
        places = yield from self.agree(offer)
        places, told = places if isinstance(places, tuple) else (places, None)
        outcome = yield from contribute(offer, places, told)
        return outcome

    @abstractmethod
    def agree(self, offer: Offer) -> Program[Tensor | tuple[Tensor, Told]]:
        """Flat positions, the same on all ranks; NO_ENTRY in places that stay empty, otherwise each once. With them the flags of all
        ranks, if these have travelled along."""

    def entry_bits(self, value_bits: float, index_bits: float, world: int) -> float:
        return (32 + 2 * value_bits) * (world - 1) / world


@dataclass(frozen=True)
class CyclicLeader(AgreedPlaces):
    """CLT-k: one rank's selection counts for everybody, and the ranks take turns.

    Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed Training"
    (NeurIPS'20). k + 2k(P-1)/P words. The leader of a group is given by its slots' step count, so that it is the same
    in every bucketing as long as the slots were always exchanged together.

    1. The leader selects and broadcasts its places.
    2. All ranks' values there are added.
    """

    def agree(self, offer: Offer) -> Program[Tensor]:
        leader = min(offer.counts, default=0) % offer.place.world
        table = offer.codec.table
        device = offer.account.c.device
        places = torch.full((table.entries,), NO_ENTRY, dtype=INDEX_DTYPE, device=device)
        if offer.place.rank == leader:
            picks = offer.pick()
            positions = table.positions(picks.indices).to(INDEX_DTYPE)
            places = torch.where(filled(picks), positions, NO_ENTRY).to(INDEX_DTYPE)
        (agreed,) = yield (Broadcast(places, f"{offer.phase}/leader", source=leader),)
        return agreed.long()

    def entry_bits(self, value_bits: float, index_bits: float, world: int) -> float:
        return 32 + 2 * value_bits * (world - 1) / world


def filled(picks: Picks) -> Tensor:
    """Which places hold a choice. One whose value is zero here counts: other ranks may have something there."""
    return (
        torch.ones_like(picks.values, dtype=torch.bool)
        if picks.counts is None
        else picks.values != 0
    )


def sums_by_owner(offer: Offer) -> bool:
    """Whether owners add the values: an all-reduce would round a narrow wire at every addition and lose that."""
    return wire_dtype(offer) != torch.float32


def contribute(offer: Offer, places: Tensor, told: Told | None = None) -> Program[Outcome]:
    """Add all ranks' values at agreed places, [m] or [world, m]: row p is then added up by rank p.

    Flags travel beside the values unless all ranks were `told` before.

    1. Write off this rank's values there, as the wire rounds them.
    2. Sum over ranks; with a narrow wire by owners, who keep what rounding their sums loses, else by one all-reduce.
    3. Slots no rank had a gradient for get no update, and their entries return to memory.
    """
    account, table = offer.account, offer.codec.table
    places = message_places(offer, places)
    taken = places >= 0
    positions = places.clamp(min=0)
    slots = slot_of(positions, table)
    mine = torch.where(taken, account.c[positions], 0.0)
    wire = to_wire(mine, wire_dtype(offer))
    sent = wire.to(account.c.dtype)
    account.write_off(positions.view(-1), sent.view(-1))
    flags = known(told) if told else ask_flags(offer, any_non_finite(mine.view(-1)))
    empty = (~taken).sum(-1) * wire.element_size()
    phase = f"{offer.phase}/values"
    if sums_by_owner(offer):
        rank = offer.place.rank
        summing = sum_by_owners(
            wire,
            phase,
            sum_dtype=account.c.dtype,
            rounding=partial(to_wire, dtype=wire.dtype),
            padding_bytes=travelling(empty, rank),
            own_padding_bytes=empty[rank],
        )
        (used_slots, non_finite), (summed, lost) = yield from together([flags, summing])
        kept = used_slots[slots[rank]] & lost.isfinite()
        account.give_back(positions[rank], torch.where(kept, lost, 0.0))
    else:
        request = Sum(wire.view(-1).clone(), phase, padding_bytes=empty.sum())
        (used_slots, non_finite), summed = yield from together([flags, ask(request)])
    total = summed.view(wire.shape).to(account.c.dtype)
    used = used_slots[slots]
    account.give_back(positions.view(-1), torch.where(used, 0.0, sent).view(-1))
    target = torch.where(used & taken, positions, NO_ENTRY).view(-1)
    counts = count_by_slot(taken.view(-1), slots.view(-1), table)
    return deliver_mean(offer, target, total.view(-1), non_finite, counts)


def message_places(offer: Offer, places: Tensor) -> Tensor:
    """Agreed places as their values travel: [world, m] where owners add them."""
    if places.dim() == 1 and sums_by_owner(offer):
        return in_shares(places, offer.place.world)
    return places


def ask_flags(offer: Offer, bad: Tensor | None = None) -> Program[Told]:
    """Everybody's flags, this rank's with `bad`."""
    flags = yield from ask(flags_request(offer, bad))
    return read_flags(flags)


def known(told: Told) -> Program[Told]:
    yield from ()
    return told


def in_shares(places: Tensor, world: int) -> Tensor:
    """[m] as [world, ceil(m / world)], filled up with NO_ENTRY."""
    missing = -places.numel() % world
    return torch.cat([places, places.new_full((missing,), NO_ENTRY)]).view(world, -1)
