"""Values-only exchange: every rank has chosen the same places, so no index has to travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from thinwire.exchange.base import Exchange, Offer, Outcome
from thinwire.exchange.common import to_wire
from thinwire.exchange.requests import Place, Program, Sum
from thinwire.exchange.sums import sum_by_owners
from thinwire.kernels.inspection import holds_non_finite
from thinwire.layout import RowTable, remembered
from thinwire.select.base import Picks, Selector
from thinwire.wire.codec import Flags


@dataclass(frozen=True)
class SharedIndices(Exchange):
    """All-reduce of the values at places that all ranks chose alike.

    1. Write this rank's values off as the value code writes them.
    2. Sum them over ranks (`sum_values`), and beside them the flags.
    3. Give back what the owner of a piece lost in rounding its sum, and all values of slots that no rank used.
    """

    sums_on_the_way = True

    def run(self, offer: Offer) -> Program[Outcome]:
        flags = yield from sum_flags(offer.flags, offer.place, offer.phase)
        return (yield from self.exchange_picks(offer, offer.pick(), *flags))

    def exchange_picks(
        self, offer: Offer, picks: Picks, had_gradient: Tensor, non_finite: Tensor
    ) -> Program[Outcome]:
        codec = offer.codec
        assert codec.values.dtype is not None
        raw = codec.values.encode(picks.values, codec.table)
        sent = codec.values.decode(raw, codec.table)
        positions = codec.table.positions(picks.indices)
        offer.account.write_off(positions, sent)
        total, lost = yield from sum_values(
            sent, codec.table, offer.place, codec.values.dtype, offer.phase
        )
        used = had_gradient[codec.table.entry_slots(total.device).long()]
        offer.account.give_back(positions, torch.where(used, lost, sent))
        update = torch.zeros_like(offer.account.c)
        mean = torch.where(used, total, 0.0) * (1 / offer.place.world)
        # Added, not written: the unused places of a slot all point at its first element and hold 0.
        update.index_add_(0, positions, mean.to(update.dtype))
        bad = non_finite | holds_non_finite(picks.values)
        sent_counts = picks.counts if picks.counts is not None else _all(offer)
        return Outcome(update, bad, sent=sent_counts)

    def objection(self, selector: Selector) -> str | None:
        if selector.same_on_all_ranks:
            return None
        return "sends no indices, so all ranks must choose the same places, as tw.RandomK does"

    def entry_bits(self, value_bits: float, index_bits: float, world: int) -> float:
        return 2 * (world - 1) / world * value_bits


def _all(offer: Offer) -> Tensor:
    table = offer.codec.table
    return remembered(table, "all", lambda: torch.tensor([rows.entries for rows in table.rows]))


def sum_flags(flags: Flags, place: Place, phase: str) -> Program[tuple[Tensor, Tensor]]:
    """(per slot: did any rank have a gradient, did any rank have a non-finite one)."""
    words = torch.cat([flags.had_gradient.float(), flags.non_finite.float()[None]])
    if place.world > 1:
        (words,) = yield (Sum(words, f"{phase}/flags", control_bytes=words.nbytes),)
    return words[:-1] > 0, words[-1] > 0


def sum_values(
    values: Tensor,
    table: RowTable,
    place: Place,
    dtype: torch.dtype,
    phase: str,
) -> Program[tuple[Tensor, Tensor]]:
    """(sum over ranks, what this rank has to keep of it) of float32 values that are exact in `dtype`.

    float32 is all-reduced. A narrower dtype would round every partial sum on the way and lose it, so there

    1. each rank sends piece p of every slot to rank p, its owner (of slots, so that another bucketing leaves the same
       remainders with the same ranks);
    2. the owner adds in float32, rank 0 first, rounds the sum once and keeps the error;
    3. the rounded sums are gathered.
    """
    nothing = torch.zeros_like(values)
    if place.world == 1 or not values.numel():
        return values, nothing
    if dtype == torch.float32:
        (total,) = yield (Sum(values.clone(), phase),)
        return total, nothing
    shares = [-(-rows.entries // place.world) for rows in table.rows]
    at = remembered(
        table,
        ("owned", place.world, values.device),
        lambda: owned_places(table, shares).to(values.device),
    )
    padded = torch.zeros(place.world * sum(shares), dtype=dtype, device=values.device)
    padded[at] = values.to(dtype)
    padding = (padded.numel() - values.numel()) * padded.element_size()
    gathered, lost = yield from sum_by_owners(
        padded.view(place.world, -1),
        phase,
        sum_dtype=torch.float32,
        rounding=partial(to_wire, dtype=dtype),
        padding_bytes=padding,
        own_padding_bytes=padding // place.world,
    )
    error = torch.zeros(place.world, sum(shares), device=values.device)
    error[place.rank] = lost
    return gathered.reshape(-1)[at].float(), error.view(-1)[at]


def owned_places(table: RowTable, shares: Sequence[int]) -> Tensor:
    """Where each entry goes in [world, sum of shares]: row = owner, columns slot by slot."""
    width, column, places = sum(shares), 0, []
    for rows, share in zip(table.rows, shares, strict=True):
        local = torch.arange(rows.entries)
        places.append((local // max(1, share)) * width + column + local % max(1, share))
        column += share
    return torch.cat(places)
