"""Values-only exchange: every rank has chosen the same places, so no index has to travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.exchange.agreed import AgreedPlaces, Told, sums_by_owner
from thinwire.exchange.base import Offer
from thinwire.exchange.common import NO_ENTRY
from thinwire.exchange.requests import Place, Program, Sum
from thinwire.layout import RowTable, remembered
from thinwire.select.base import Selector
from thinwire.wire.codec import Flags


@dataclass(frozen=True)
class SharedIndices(AgreedPlaces):
    """All-reduce of the values at places that all ranks chose alike.

    Nothing has to be agreed on. A narrow value code is added up by owners, who have a piece of every slot each, so that another
    bucketing leaves the same remainders with the same ranks.
    """

    def agree(self, offer: Offer) -> Program[Tensor | tuple[Tensor, Told]]:
        yield from ()
        picks = offer.pick()
        return places_of(offer, picks.indices, picks.counts)

    def objection(self, selector: Selector) -> str | None:
        if selector.same_on_all_ranks:
            return None
        return "sends no indices, so all ranks must choose the same places, as tw.RandomK does"

    def entry_bits(self, value_bits: float, index_bits: float, world: int) -> float:
        return 2 * (world - 1) / world * value_bits


def places_of(offer: Offer, indices: Tensor, counts: Tensor | None) -> Tensor:
    """Flat positions of indices that all ranks chose, NO_ENTRY in places beyond a slot's count: [entries], or [world, m] where owners
    add."""
    table, device, world = offer.codec.table, indices.device, offer.place.world
    positions = table.positions(indices)
    if counts is not None:
        room = counts[table.entry_slots(device).long()]
        positions = torch.where(table.entry_places(device) < room, positions, NO_ENTRY)
    if not sums_by_owner(offer):
        return positions
    shares = [-(-rows.entries // world) for rows in table.rows]
    at = remembered(table, ("owned", world, device), lambda: owned_places(table, shares).to(device))
    places = positions.new_full((world * sum(shares),), NO_ENTRY)
    return places.index_copy_(0, at, positions).view(world, -1)


def sum_flags(flags: Flags, place: Place, phase: str) -> Program[tuple[Tensor, Tensor]]:
    """(per slot: did any rank have a gradient, did any rank have a non-finite one)."""
    words = torch.cat([flags.had_gradient.float(), flags.non_finite.float()[None]])
    if place.world > 1:
        (words,) = yield (Sum(words, f"{phase}/flags", control_bytes=words.nbytes),)
    return words[:-1] > 0, words[-1] > 0


def owned_places(table: RowTable, shares: Sequence[int]) -> Tensor:
    """Where each entry goes in [world, sum of shares]: row = owner, columns slot by slot."""
    width, column, places = sum(shares), 0, []
    for rows, share in zip(table.rows, shares, strict=True):
        local = torch.arange(rows.entries)
        places.append((local // max(1, share)) * width + column + local % max(1, share))
        column += share
    return torch.cat(places)
