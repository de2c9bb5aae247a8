"""Exclusive partitions: every rank selects in a part of the gradient of its own, and the parts rotate.

The idea of ExDyna (arXiv 2402.13781), MiCRO and DEFT: no place is chosen twice, so there is no fill-in and the number
of places is known beforehand.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.exchange.agreed import AgreedPlaces, filled
from thinwire.exchange.base import Offer
from thinwire.exchange.common import INDEX_DTYPE, NO_ENTRY, remembered
from thinwire.exchange.regions import block_bits, deal_blocks
from thinwire.exchange.requests import AllGather, Program
from thinwire.select.rows import RowTable, SlotRows

# With fewer rows per part than this, one row more or less would unbalance the parts.
ROWS_PER_PART = 8


@dataclass(frozen=True)
class Exclusive(AgreedPlaces):
    """thinwire's own: exclusive rotating parts, then a dense all-reduce of the chosen values. 3k(P-1)/P words.

    1. Every slot is cut into P parts (runs of rows, or small blocks dealt out at random); at each step a rank gets the
       next one. Which part is whose follows from the slot's name and step count alone, so it is the same in every
       bucketing.
    2. Each rank selects in its part about 1/P of the slot's entries, at 1/P of the cost.
    3. The places are gathered: k(P-1)/P words.
    4. All ranks' values at all places are added: 2k(P-1)/P words. Every rank clears all of them.
    """

    def agree(self, offer: Offer) -> Program[Tensor]:
        table, world = offer.codec.table, offer.place.world
        device = offer.account.c.device
        parts = remembered(table, ("parts", world, device), lambda: Parts(table, world, device))
        places = yield from gather_places(offer, parts)
        return places


def gather_places(offer: Offer, parts: Parts) -> Program[Tensor]:
    """Select in this rank's part and gather everybody's places."""
    turns = parts.turns(offer.steps)
    capacity = parts.capacity(turns)
    device = offer.account.c.device
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    chosen = torch.cat([*parts.select(offer, turns), nothing])
    places = torch.full((capacity,), NO_ENTRY, dtype=INDEX_DTYPE, device=device)
    places[: chosen.numel()] = chosen.to(INDEX_DTYPE)
    empty = (places < 0).sum() * places.element_size()
    (gathered,) = yield (AllGather(places, f"{offer.phase}/places", padding_bytes=empty),)
    return gathered.long()


class Parts:
    """The cut of a row table into `world` parts of nearly equal numbers of entries, slot by slot."""

    def __init__(self, table: RowTable, world: int, device: torch.device) -> None:
        self.world = world
        self.numel = table.numel
        self.cuts: list[RowCut | BlockCut] = [cut(rows, world, device) for rows in table.rows]
        self._starts = [zlib.crc32(rows.slot.name.encode()) % world for rows in table.rows]
        self._tables: dict[tuple[tuple[int, ...], tuple[int, ...]], RowTable] = {}
        self._capacities: dict[tuple[int, ...], int] = {}

    def turns(self, steps: Sequence[int]) -> tuple[int, ...]:
        """Per slot: the part that rank 0 has at this step."""
        counts = steps or [0] * len(self._starts)
        return tuple(
            (start + count) % self.world for start, count in zip(self._starts, counts, strict=True)
        )

    def capacity(self, turns: tuple[int, ...]) -> int:
        """Entries of the rank that has most."""
        if turns not in self._capacities:
            loads = [
                sum(
                    one.entries((turn + rank) % self.world)
                    for one, turn in zip(self.cuts, turns, strict=True)
                )
                for rank in range(self.world)
            ]
            self._capacities[turns] = max(1, *loads)
        return self._capacities[turns]

    def select(self, offer: Offer, turns: tuple[int, ...]) -> list[Tensor]:
        """Flat positions this rank chooses in its parts, NO_ENTRY where a place stays empty."""
        assert offer.pick_rows is not None
        mine = tuple((turn + offer.place.rank) % self.world for turn in turns)
        runs = [w for w, one in enumerate(self.cuts) if isinstance(one, RowCut)]
        blocks = [w for w, one in enumerate(self.cuts) if isinstance(one, BlockCut)]
        c, found = offer.account.c, []
        for members in (runs, blocks):
            members = [which for which in members if self.cuts[which].entries(mine[which])]
            if not members:
                continue
            sampled = isinstance(self.cuts[members[0]], BlockCut)
            flat = self._sample(c, members, mine) if sampled else c
            table = self._table(members, mine, flat.numel())
            picks = offer.pick_rows(table, members, flat)
            positions = table.positions(picks.indices)
            if sampled:
                positions = self._origins(picks.indices, table, members, mine)
            found.append(torch.where(filled(picks), positions, NO_ENTRY))
        return found

    def _blocks(self, members: Sequence[int]) -> list[BlockCut]:
        return [one for which in members if isinstance(one := self.cuts[which], BlockCut)]

    def _sample(self, c: Tensor, members: Sequence[int], mine: tuple[int, ...]) -> Tensor:
        cuts = self._blocks(members)
        return torch.cat([one.take(c, mine[w]) for one, w in zip(cuts, members, strict=True)])

    def _origins(
        self, indices: Tensor, table: RowTable, members: Sequence[int], mine: tuple[int, ...]
    ) -> Tensor:
        """Where the chosen elements of a sample lie in the group."""
        cuts = enumerate(zip(self._blocks(members), members, strict=True))
        return torch.cat(
            [one.positions(indices[table.slot_slice(row)], mine[w]) for row, (one, w) in cuts]
        )

    def _table(self, members: Sequence[int], mine: tuple[int, ...], numel: int) -> RowTable:
        key = (tuple(members), mine)
        if key not in self._tables:
            rows, offset = [], 0
            for which in members:
                rows.append(self.cuts[which].rows_of(mine[which], offset))
                offset += rows[-1].length
            self._tables[key] = RowTable(rows, numel)
        return self._tables[key]


def cut(rows: SlotRows, world: int, device: torch.device) -> RowCut | BlockCut:
    """Runs of whole rows where there are enough of them; otherwise blocks dealt out at random."""
    if rows.sizes and rows.sizes[0] >= ROWS_PER_PART * world:
        return RowCut(rows, world)
    return BlockCut(rows, world, device)


class RowCut:
    """A run of rows per part: each part selects in its rows exactly what the whole selection would."""

    def __init__(self, rows: SlotRows, world: int) -> None:
        self.parts = [self._cut(rows, part, world) for part in range(world)]

    def _cut(self, rows: SlotRows, part: int, world: int) -> SlotRows:
        start, stop = share(rows.sizes[0], part, world)
        slot = rows.slot.at(rows.slot.offset + start * rows.strides[0])
        return replace(rows, slot=slot, sizes=(stop - start, *rows.sizes[1:]))

    def entries(self, part: int) -> int:
        return self.parts[part].entries

    def rows_of(self, part: int, offset: int) -> SlotRows:
        return self.parts[part]


class BlockCut:
    """Small blocks of the slot, dealt out at random, so that every part is a fair sample of the slot.

    Contiguous parts would give a quiet region as many entries as a loud one. A part selects as one row.
    """

    def __init__(self, rows: SlotRows, world: int, device: torch.device) -> None:
        slot = rows.slot
        self.rows = rows
        self.end = slot.offset + slot.numel
        self.block = 1 << block_bits(slot.numel, world)
        blocks = -(-slot.numel // self.block)
        part_of = deal_blocks(slot.name, blocks) % world
        firsts = slot.offset + self.block * torch.arange(blocks)
        self.starts = [firsts[part_of == part].to(device) for part in range(world)]
        """Where the blocks of each part begin, rising."""
        self.keeps = []
        for part in range(world):
            first, last = share(rows.entries, part, world)
            self.keeps.append(min(last - first, self.starts[part].numel() * self.block))

    def entries(self, part: int) -> int:
        return self.keeps[part]

    def rows_of(self, part: int, offset: int) -> SlotRows:
        """The part as one row of a buffer of gathered blocks."""
        return replace(
            self.rows,
            slot=self.rows.slot.at(offset),
            sizes=(),
            strides=(),
            length=self.starts[part].numel() * self.block,
            stride=1,
            keep=self.keeps[part],
        )

    def take(self, flat: Tensor, part: int) -> Tensor:
        """The part's elements, block after block; zeros beyond the end of the slot."""
        places = self.starts[part][:, None] + torch.arange(self.block, device=flat.device)
        values = flat[places.clamp(max=self.end - 1)]
        return torch.where(places < self.end, values, 0.0).reshape(-1)

    def positions(self, indices: Tensor, part: int) -> Tensor:
        """Flat positions of indices into `take`; NO_ENTRY beyond the end of the slot."""
        places = self.starts[part][indices // self.block] + indices % self.block
        return torch.where(places < self.end, places, NO_ENTRY)


def share(total: int, part: int, world: int) -> tuple[int, int]:
    """The `part`-th of `world` nearly equal runs of range(total)."""
    return total * part // world, total * (part + 1) // world
