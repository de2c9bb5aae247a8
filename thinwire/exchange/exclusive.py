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

from thinwire.exchange.agreed import AgreedPlaces, Told, filled
from thinwire.exchange.base import Offer
from thinwire.exchange.common import INDEX_DTYPE, NO_ENTRY, typed
from thinwire.exchange.regions import block_bits, deal_blocks
from thinwire.exchange.requests import Gather, Program
from thinwire.kernels.cuda.entries import BlockTaker
from thinwire.kernels.cuda.toolchain import Toolchain, kernels_for
from thinwire.layout import RowTable, SlotRows, remembered

# With fewer rows per part than this, one row more or less would unbalance the parts.
ROWS_PER_PART = 8


@dataclass(frozen=True)
class Exclusive(AgreedPlaces):
    """thinwire's own: exclusive rotating parts, then a dense all-reduce of the chosen values. 3k(P-1)/P words.

    1. Every slot is cut into P parts (runs of rows, or small blocks dealt out at random); at each step a rank gets the
       next one. Which part is whose follows from the slot's name and step count alone, so it is the same in every
       bucketing.
    2. Each rank selects in its part about 1/P of the slot's entries, at 1/P of the cost.
    3. The places are gathered, and every rank's flags: k(P-1)/P words.
    4. All ranks' values at all places are added: 2k(P-1)/P words. Every rank clears all of them.
    """

    @property
    def gathered_after(self) -> int | None:
        return 0

    def agree(self, offer: Offer) -> Program[Tensor | tuple[Tensor, Told]]:
        table, world = offer.codec.table, offer.place.world
        device = offer.account.c.device
        parts = remembered(table, ("parts", world, device), lambda: Parts(table, world, device))
        agreed = yield from gather_places(offer, parts)
        return agreed


def gather_places(offer: Offer, parts: Parts) -> Program[tuple[Tensor, Told]]:
    """Select in this rank's part and gather everybody's places, behind everybody's flags.

    Nothing is overlooked that is not finite: whoever has an exchange that does not offer all looks at all of c before.
    """
    turns = parts.turns(offer.counts)
    capacity = parts.capacity(turns)
    device = offer.account.c.device
    flags = torch.cat([offer.flags.non_finite[None], offer.flags.had_gradient])
    chosen = torch.cat([flags.long(), *parts.select(offer, turns)])
    words = torch.full((flags.numel() + capacity,), NO_ENTRY, dtype=INDEX_DTYPE, device=device)
    words[: chosen.numel()] = chosen.to(INDEX_DTYPE)
    request = Gather(
        words.view(torch.uint8),
        f"{offer.phase}/places",
        control_bytes=flags.numel() * words.element_size(),
        padding_bytes=(words < 0).sum() * words.element_size(),
        apart=True,
    )
    (gathered,) = yield (request,)
    words = typed(gathered, INDEX_DTYPE)
    raised = words[:, : flags.numel()].amax(0) > 0
    return words[:, flags.numel() :].long(), (raised[1:], raised[0])


class Parts:
    """The cut of a row table into `world` parts of nearly equal numbers of entries, slot by slot."""

    def __init__(self, table: RowTable, world: int, device: torch.device) -> None:
        self.world = world
        self.numel = table.numel
        self.device = device
        self.cuts: list[RowCut | BlockCut] = [cut(rows, world, device) for rows in table.rows]
        self._starts = [zlib.crc32(rows.slot.name.encode()) % world for rows in table.rows]
        self._samples: dict[tuple[int, ...], list[RowSample | BlockSample]] = {}
        self._capacities: dict[tuple[int, ...], int] = {}

    def turns(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Per slot: the part that rank 0 has after so many exchanges."""
        counts = counts or [0] * len(self._starts)
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
        mine = tuple((turn + offer.place.rank) % self.world for turn in turns)
        if mine not in self._samples:
            self._samples[mine] = self.cut_samples(mine)
        found = []
        for sample in self._samples[mine]:
            picks = offer.pick_on(sample.table, sample.members, sample.take(offer.account.c))
            positions = sample.positions(picks.indices)
            found.append(torch.where(filled(picks), positions, NO_ENTRY))
        return found

    def cut_samples(self, mine: tuple[int, ...]) -> list[RowSample | BlockSample]:
        """What a rank selects from that has part mine[w] of slot w."""
        busy = [w for w, one in enumerate(self.cuts) if one.entries(mine[w])]
        runs = [(w, one.parts[mine[w]]) for w in busy if isinstance(one := self.cuts[w], RowCut)]
        blocks = [(w, one) for w in busy if isinstance(one := self.cuts[w], BlockCut)]
        samples: list[RowSample | BlockSample] = []
        if runs:
            samples.append(RowSample(runs, self.numel))
        if blocks:
            samples.append(BlockSample(blocks, mine, self.device))
        return samples


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


class RowSample:
    """Runs of rows, which are selected from where they are."""

    def __init__(self, runs: Sequence[tuple[int, SlotRows]], numel: int) -> None:
        self.members = [w for w, _ in runs]
        self.table = RowTable([rows for _, rows in runs], numel)

    def take(self, flat: Tensor) -> Tensor:
        return flat

    def positions(self, indices: Tensor) -> Tensor:
        """Flat positions of row-local indices."""
        return self.table.positions(indices)


class BlockSample:
    """The blocks of a rank's parts of some slots, taken out of the group: all that have one size at once."""

    def __init__(
        self, cuts: Sequence[tuple[int, BlockCut]], mine: tuple[int, ...], device: torch.device
    ) -> None:
        # Slots with blocks of one size side by side.
        cuts = sorted(cuts, key=lambda one: one[1].block)
        self.members = [w for w, _ in cuts]
        rows, offset = [], 0
        for w, one in cuts:
            rows.append(one.rows_of(mine[w], offset))
            offset += rows[-1].length
        self.table = RowTable(rows, offset)
        starts = [one.starts[mine[w]] for w, one in cuts]
        self.starts = torch.cat(starts)
        """Where each block begins in the group."""
        counts = torch.tensor([len(one) for one in starts])
        firsts, sizes = counts.cumsum(0) - counts, torch.tensor([one.block for _, one in cuts])
        ends = torch.tensor([one.end for _, one in cuts])
        self._by_slot = torch.stack([firsts, sizes, ends]).to(device)
        """[3, slots]: the first block of a slot's part, the size of its blocks, where the slot ends in the group."""
        by_block = ends.repeat_interleave(counts).to(device)
        self._blocks = (self.starts, by_block, sizes.repeat_interleave(counts))
        self._takers: dict[Toolchain, BlockTaker] = {}
        self._alike: list[tuple[Tensor, Tensor, Tensor]] = []
        """Blocks of one size: where they begin, where their slots end, and the places inside a block."""
        for size in sizes.unique().tolist():
            chosen = slice(*(counts[sizes < size].sum(), counts[sizes <= size].sum()))
            inside = torch.arange(size, device=device)
            self._alike.append((self.starts[chosen, None], by_block[chosen, None], inside))

    def take(self, flat: Tensor) -> Tensor:
        """The elements, block after block; zeros beyond the end of a slot."""
        toolchain = kernels_for(flat.device) if flat.dtype == torch.float32 else None
        if toolchain is not None:
            if toolchain not in self._takers:
                self._takers[toolchain] = BlockTaker(toolchain, *self._blocks)
            return self._takers[toolchain].take(flat)
        parts = []
        for starts, ends, inside in self._alike:
            places = starts + inside
            values = flat[torch.minimum(places, ends - 1)]
            parts.append(torch.where(places < ends, values, 0.0).view(-1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def positions(self, indices: Tensor) -> Tensor:
        """Flat positions of indices into each slot's blocks; NO_ENTRY beyond the end of the slot."""
        first, size, end = self._by_slot[:, self.table.entry_slots(indices.device).long()]
        places = self.starts[first + indices // size] + indices % size
        return torch.where(places < end, places, NO_ENTRY)


def share(total: int, part: int, world: int) -> tuple[int, int]:
    """The `part`-th of `world` nearly equal runs of range(total)."""
    return total * part // world, total * (part + 1) // world
