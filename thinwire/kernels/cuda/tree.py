"""TreeKernels: merges of lists on CUDA. Three launches for the first list of a group, three for each merge, two for the update.

Reference: `MergeStep` in thinwire/exchange/tree.py. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from thinwire.kernels.cuda.chunks import BINS
from thinwire.kernels.cuda.launch import PreparedLaunch, Varying
from thinwire.kernels.cuda.messages import (
    COUNTED,
    STATS,
    MessageKernels,
    MessagesSent,
    in_words,
    read_float,
)
from thinwire.kernels.cuda.prepared import BAD, MEMORY
from thinwire.kernels.cuda.source import Defines
from thinwire.kernels.cuda.split_tables import (
    EMIT_WARPS,
    Columns,
    RangeState,
    SplitTables,
    cut_ranges,
    split_defines,
)
from thinwire.kernels.cuda.structs import make_table
from thinwire.layout import Group, RowTable
from thinwire.wire.codec import Codec

MERGE_THREADS = 256
PIECE = 512
"""Places of a merged list that one warp has."""
MOST_ELEMENTS = 1 << 30
"""Of a group. Every slot is one block."""
MINE, THEIRS, MERGED, FLAGS, INDICES, AMOUNTS, GUESSES = map(
    Varying, ("mine", "theirs", "merged", "flags", "indices", "amounts", "guesses")
)
NOTHING, ROUNDING, ALL = range(3)
"""What a rank may keep of a merge: nothing, what rounding lost of the sums that stay, or that and the other sums."""


@dataclass(frozen=True, eq=False)
class Left:
    """What a merge left over for this rank's memory, in a merged list."""

    indices: Tensor
    """int32 [places]: flat positions."""
    amounts: Tensor
    """float32 [places]: 0 where there is nothing."""


def tree_defines(wire: torch.dtype) -> Defines:
    """For values of this dtype on the wire."""
    return (*split_defines(wire), ("MERGE_THREADS", MERGE_THREADS), ("KEEP_ALL", ALL))


def tree_tables(table: RowTable) -> SplitTables:
    """One owner has everything, and indices are positions."""
    starts = [rows.slot.offset for rows in table.rows]
    slots, rooms = range(len(starts)), [rows.entries for rows in table.rows]
    return SplitTables(
        edges=[*starts, table.numel],
        blocks=slots,
        firsts=slots,
        shifts=[MOST_ELEMENTS.bit_length() - 1] * len(starts),
        rooms=rooms,
        back=rooms,
        winners=rooms,
        owners=torch.zeros(len(starts), dtype=torch.int64),
        begins=torch.tensor(starts),
        starts=torch.tensor(starts),
        region_blocks=len(starts),
    )


class TreeKernels(MessageKernels):
    """A rank merges its list with that of another, and both have the result."""

    lists = 2

    def __init__(
        self,
        group: Group,
        picked: Codec,
        wire: torch.dtype,
        world: int,
        rounds: int,
        *,
        conserve: bool,
        into_bucket: bool,
    ) -> None:
        """`rounds` is how often a rank may merge in a step."""
        tables = tree_tables(picked.table)
        self._rounds, self._conserve = rounds, conserve
        self._kept = ALL if conserve else NOTHING if wire == torch.float32 else ROUNDING
        self._merge_defines = tree_defines(wire)
        edges = [*accumulate((2 * room for room in tables.rooms), initial=0)]
        super().__init__(
            group,
            picked,
            tables,
            wire,
            cut_ranges(edges, PIECE),
            rank=-1,
            owners=1,
            world=world,
            into_bucket=into_bucket,
        )
        self.list_bytes = self.form.row - self.head

    @property
    def settled(self) -> Tensor:
        return self.used if self._conserve else super().settled

    def _describe(self, picked: Codec, tables: SplitTables, ranges: Sequence[Columns]) -> None:
        super()._describe(picked, tables, ranges)
        begins = torch.cat([part["begin"] for part in ranges])
        ends = torch.cat([part["end"] for part in ranges])
        pieces = make_table(RangeState, list=begins, count=ends - begins, end=ends)
        self._states.copy_(pieces)
        self._round_guesses = self._room(self._rounds, len(tables.rooms))

    def _prepare(self, picked: Codec) -> None:
        super()._prepare(picked)
        form, slots, pieces = self.form, len(self.group.slots), len(self._ranges)
        blocks, cuts = -(-2 * self.total // MERGE_THREADS), self._cuts[0]
        listed = [self.slots, self._place_slots, INDICES, AMOUNTS]
        told = [self.damaged, form]
        cut = [self.slots, self._states, INDICES, AMOUNTS, GUESSES, cuts, STATS, self.lists]
        read = [self.slots, self._ranges, self._states, INDICES, AMOUNTS, cuts, self.damaged]
        self._merges = [
            [
                self._merge_launch("tree_merge", blocks, [MINE, THEIRS, self.used, *listed, *told]),
                self._launch("split_decide", slots, BINS, cut),
                self._merge_launch(
                    "tree_emit",
                    -(-pieces // EMIT_WARPS),
                    [*read, MERGED, STATS, form, pieces, keeps, float(self.entry_bytes)],
                    32 * EMIT_WARPS,
                ),
            ]
            for keeps in (NOTHING, ROUNDING, ALL)
        ]
        self._learn = self._merge_launch("tree_learn", 1, [FLAGS, self.used, self.wrong, slots])
        held = [INDICES, AMOUNTS, MEMORY]
        self._bank, self._unbank = (
            self._merge_launch("tree_bank", blocks, [*held, flag, sign, 2 * self.total])
            for flag, sign in ((self.every_slot, 1.0), (BAD, -1.0))
        )

    def _merge_launch(
        self, name: str, blocks: int, args: Sequence[object], threads: int = MERGE_THREADS
    ) -> PreparedLaunch:
        kernel = self._toolchain.compile("tree.cu", name, self._merge_defines)
        return PreparedLaunch(kernel, blocks, threads, args)

    def send(self, payload: Tensor, memory: Tensor) -> MessagesSent:
        """The first list out of picked entries, which `memory` does not hold: row 0 of `offer`, behind the flags."""
        return self.place(payload, memory, 0, 0)

    def learn(self, flags: Tensor) -> None:
        """The flags of all ranks, summed: float32 [slots + 1]."""
        self._learn.start({"flags": flags.data_ptr()})

    def merge(
        self, mine: Tensor, theirs: Tensor, number: int, keeps: bool
    ) -> tuple[Tensor, Tensor, Left | None]:
        """(the merged list, bytes of its empty places, what is left over if it `keeps` any of it). `number` counts the merges of a
        step."""
        kept = self._kept if keeps else NOTHING
        # As the one row of a table, since the words of a row are looked at.
        theirs, device = in_words(theirs[None]), self.group.device
        merged = torch.empty(self.list_bytes, dtype=torch.uint8, device=device)
        stats = torch.zeros(COUNTED, dtype=torch.int32, device=device)
        indices, amounts = self._lists
        if kept:
            indices, amounts = torch.empty_like(indices), torch.empty_like(amounts)
        values = {
            "mine": mine.data_ptr(),
            "theirs": theirs.data_ptr(),
            "merged": merged.data_ptr(),
            "indices": indices.data_ptr(),
            "amounts": amounts.data_ptr(),
            "guesses": self._round_guesses[number].data_ptr(),
            "stats": stats.data_ptr(),
        }
        for launch in self._merges[kept]:
            launch.start(values)
        return merged, read_float(stats, 1), Left(indices, amounts) if kept else None

    def bank(self, left: Left, memory: Tensor) -> None:
        """What is left over, to memory."""
        self._bank.start(self._held(left, memory))

    def unbank(self, left: Left, memory: Tensor, bad: Tensor) -> None:
        """Out of it again, if the flag is up."""
        self._unbank.start({**self._held(left, memory), "bad": bad.data_ptr()})

    def _held(self, left: Left, memory: Tensor) -> dict[str, int]:
        return {
            "indices": left.indices.data_ptr(),
            "amounts": left.amounts.data_ptr(),
            "memory": memory.data_ptr(),
        }
