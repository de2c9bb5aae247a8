"""Hierarchical: dense inside a host, sparse between hosts.

1. Inside the host every local rank receives its shard of everybody's compensated gradient and adds it up.
2. Local rank l of every host runs the outer exchange with its peers, on the shard.
3. Inside the host the shards of the update are gathered.

A slot is cut by whole rows wherever its selection has rows, so a shard of a parameter selects as the parameter would, and
a shard depends on the slot and its usual rows alone, never on the bucket or the turn. What the outer exchange does not send is held by the shard's
rank; the other ranks of the host hold nothing of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.exchange.base import Exchange, ExchangeSession, Offer, Outcome
from thinwire.exchange.exclusive import share
from thinwire.exchange.requests import (
    BETWEEN,
    INSIDE,
    AllToAll,
    Gather,
    Place,
    Program,
    Sum,
    rescoped,
)
from thinwire.exchange.split import SplitReduce
from thinwire.kernels.journal import Journal
from thinwire.layout import RowTable, Shard, Slot, SlotRows, remembered
from thinwire.memory.account import Account
from thinwire.validate import check_instance, check_positive_int
from thinwire.wire.codec import Codec, Flags


@dataclass(frozen=True, kw_only=True)
class Hierarchical(Exchange):
    """Any exchange between hosts, around it a dense reduce-scatter and an all-gather inside each host.

    The ranks of a host must have consecutive numbers: host = rank // per_host, as torchrun numbers them.
    """

    outer: Exchange = field(default_factory=SplitReduce)
    """The exchange between hosts."""
    per_host: int | None = None
    """Ranks per host; None takes LOCAL_WORLD_SIZE, which torchrun sets."""

    sums_on_the_way = True
    moves_memory = True

    def __post_init__(self) -> None:
        check_instance(
            "outer", self.outer, Exchange, "an exchange such as tw.exchange.SplitReduce()"
        )
        if self.per_host is None:
            if "LOCAL_WORLD_SIZE" not in os.environ:
                raise UsageError(
                    "per_host is None and LOCAL_WORLD_SIZE is not set; it must be the number of ranks on each host"
                )
            object.__setattr__(self, "per_host", int(os.environ["LOCAL_WORLD_SIZE"]))
        check_positive_int("per_host", self.per_host)

    @property
    def host_sync_free(self) -> bool:  # type: ignore[override]
        return self.outer.host_sync_free

    @property
    def offers_all(self) -> bool:  # type: ignore[override]
        return self.outer.offers_all

    @property
    def host_sizes(self) -> frozenset[int]:
        return frozenset({self.local})

    @property
    def local(self) -> int:
        assert self.per_host is not None
        return self.per_host

    def session(self) -> ExchangeSession:
        return HierarchicalSession(self)

    def run(self, offer: Offer) -> Program[Outcome]:
        outcome = yield from self.session().run(offer)
        return outcome

    def shard(self, rows: SlotRows, place: Place) -> Shard:
        return cut(rows, place.rank % self.local, self.local)

    def entry_bits(self, value_bits: float, index_bits: float, world: int) -> float:
        """Between hosts only: the links inside are taken to be fast."""
        hosts = max(2, world // self.local)
        return self.outer.entry_bits(value_bits, index_bits, hosts) / self.local


class HierarchicalSession(ExchangeSession):
    def __init__(self, setting: Hierarchical) -> None:
        super().__init__(setting)
        self.setting = setting
        self.outer = setting.outer.session()

    def keep_journal(self, journal: Journal) -> None:
        self.outer.keep_journal(journal)

    def state_dict(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        return self.outer.state_dict(names)

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        self.outer.load_state_dict(state)

    def run(self, offer: Offer) -> Program[Outcome]:
        local, world = self.setting.local, offer.place.world
        if world % local:
            raise UsageError(f"per_host is {local}; it must divide the number of ranks, {world}")
        table, account = offer.codec.table, offer.account
        device = account.c.device
        usual = offer.usual_rows or table.rows
        shards = remembered(
            table, ("shards", local, device), lambda: Shards(table, usual, local, device)
        )
        mine = offer.place.rank % local
        summed, flags = yield from self._gather_shard(offer, shards, mine)
        codec = remembered(
            table,
            ("codec", local, mine, offer.codec.values, offer.codec.indices),
            lambda: Codec(shards.tables[mine], offer.codec.values, offer.codec.indices),
        )
        place = Place(offer.place.rank // local, world // local)
        # The outer exchange's view: the shard is its whole gradient.
        inner = replace(offer, account=Account(summed), codec=codec, flags=flags, place=place)
        outcome: Outcome = yield from rescoped(self.outer.run(inner), BETWEEN)
        account.give_back(shards.positions[mine], summed)
        update, bad = yield from _gather_update(offer, shards, outcome)
        sent = outcome.sent
        if sent is None and outcome.header is not None:
            sent = outcome.header.counts[place.rank]
        return Outcome(update.mul_(1 / local), bad, sent=sent)

    def _gather_shard(
        self, offer: Offer, shards: Shards, mine: int
    ) -> Program[tuple[Tensor, Flags]]:
        """(the host's sum of this rank's shard, the host's flags). Everything leaves this rank's account."""
        c = offer.account.c
        pieces = torch.stack([shards.take(c, rank) for rank in range(len(shards.positions))])
        everything = torch.cat(shards.positions)
        offer.account.write_off(everything, c[everything])
        words = torch.cat([offer.flags.had_gradient, offer.flags.non_finite[None]]).to(torch.int32)
        flags, arrived = yield (
            Sum(words, f"{offer.phase}/inside/flags", control_bytes=words.nbytes, scope=INSIDE),
            AllToAll(pieces, f"{offer.phase}/inside/shards", scope=INSIDE),
        )
        total = arrived[0].clone()
        for piece in arrived[1:]:
            total += piece
        summed = total[: shards.tables[mine].numel]
        # The sum can overflow where nobody selects.
        bad = (flags[-1] > 0) | ~summed.isfinite().all()
        return summed, Flags(non_finite=bad, had_gradient=flags[:-1] > 0)


def _gather_update(
    offer: Offer, shards: Shards, outcome: Outcome
) -> Program[tuple[Tensor, Tensor]]:
    """(the whole update, whether any shard was bad)."""
    update = outcome.update
    message = update.new_zeros(shards.longest + 1)
    message[: update.numel()] = update
    message[-1] = outcome.non_finite.to(update.dtype)
    padding = (shards.longest - update.numel()) * update.element_size()
    request = Gather(
        message,
        f"{offer.phase}/inside/update",
        control_bytes=update.element_size(),
        padding_bytes=padding,
        scope=INSIDE,
    )
    (gathered,) = yield (request,)
    whole = torch.zeros_like(offer.account.c)
    for positions, piece in zip(shards.positions, gathered, strict=True):
        whole[positions] = piece[: positions.numel()]
    return whole, (gathered[:, -1] > 0).any()


class Shards:
    """The cut of a row table over the ranks of a host, and each shard's own table, laid out row by row."""

    def __init__(
        self, table: RowTable, usual: Sequence[SlotRows], local: int, device: torch.device
    ) -> None:
        self.positions: list[Tensor] = []
        self.tables: list[RowTable] = []
        for part in range(local):
            rows: list[SlotRows] = []
            positions: list[Tensor] = []
            offset = 0
            for whole, by in zip(table.rows, usual, strict=True):
                shard = cut(by, part, local)
                rows.append(shard_rows(whole, shard, part, local, offset))
                positions.append(shard_positions(whole, shard))
                offset += positions[-1].numel()
            self.tables.append(RowTable(rows, offset))
            self.positions.append(torch.cat(positions).to(device))
        self.longest = max(shard.numel for shard in self.tables)

    def take(self, flat: Tensor, rank: int) -> Tensor:
        """A shard's elements, filled up to the longest shard."""
        out = flat.new_zeros(self.longest)
        positions = self.positions[rank]
        out[: positions.numel()] = flat[positions]
        return out


def cut(usual: SlotRows, part: int, local: int) -> Shard:
    """This part's shard of a slot: along the first dimension that its usual rows do not run along, dim 0 as a rule;
    in memory order where that dimension is shorter than the ranks are many."""
    slot = usual.slot
    if local == 1:
        return Shard(slot.shape)
    dim = _row_dim(usual)
    if dim is not None and slot.shape[dim] >= local:
        start, stop = share(slot.shape[dim], part, local)
        return Shard(slot.shape, dim, start, size=stop - start)
    start, stop = share(slot.numel, part, local)
    return Shard(slot.shape, None, start, size=stop - start)


def _row_dim(rows: SlotRows) -> int | None:
    """The dimension that a slot's rows are counted along first; dim 0 where the whole tensor is one row."""
    slot = rows.slot
    if not rows.sizes:
        return 0 if slot.shape else None
    along = (rows.sizes[0], rows.strides[0])
    dims = zip(slot.shape, slot.strides, strict=True)
    return next((dim for dim, one in enumerate(dims) if one == along), None)


def shard_rows(rows: SlotRows, shard: Shard, part: int, local: int, offset: int) -> SlotRows:
    """A shard's rows one after another in a buffer of their own: whole rows where the cut leaves them whole, otherwise
    one row with its share of the entries."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    if _keeps_rows(rows, shard):
        size = rows.sizes[0] if shard.size is None else shard.size
        count, length, keep = math.prod((size, *rows.sizes[1:])), rows.length, rows.keep
        sizes, strides = (count,), (length,)
    else:
        count, length = 1, math.prod(shard.shape)
        first, last = share(rows.entries, part, local)
        # At least one entry wherever there is an element: a shard without any would hold its part back for ever.
        keep = min(max(1, last - first), length)
        sizes, strides = (), ()
    slot = Slot(rows.slot.name, (count, length), (length, 1), offset, rows.slot.kind, shard)
    return replace(
        rows, slot=slot, sizes=sizes, strides=strides, length=length, stride=1, keep=keep
    )


def shard_positions(rows: SlotRows, shard: Shard) -> Tensor:
    """Flat positions of a shard's elements in the group, row by row."""
    if not _keeps_rows(rows, shard):
        places = torch.arange(rows.slot.offset + rows.slot.numel)
        return rows.slot.part(places, shard).reshape(-1).sort().values
    if shard.size is not None:
        slot = rows.slot.at(rows.slot.offset + shard.offset * rows.strides[0])
        rows = replace(rows, slot=slot, sizes=(shard.size, *rows.sizes[1:]))
    inside = torch.arange(rows.length) * rows.stride
    return (rows.row_offsets()[:, None] + inside).reshape(-1)


def _keeps_rows(rows: SlotRows, shard: Shard) -> bool:
    """Whether the cut runs between rows."""
    return bool(rows.sizes) and (
        shard.size is None or (shard.dim is not None and shard.dim == _row_dim(rows))
    )
