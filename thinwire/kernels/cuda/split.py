"""SplitKernels: split-and-reduce on CUDA. Seven launches for a group, from picked entries to the update in the bucket.

Reference: `SplitStep` in thinwire/exchange/split.py. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.cuda.chunks import BINS
from thinwire.kernels.cuda.clear import Cleared, cut_cleared
from thinwire.kernels.cuda.joint import Joint, JointKernel, joint_kernel
from thinwire.kernels.cuda.launch import PreparedLaunch, Varying, fitting
from thinwire.kernels.cuda.prepared import GATHERED, MEMORY, OUT, PAYLOAD, STRIDE, payload_defines
from thinwire.kernels.cuda.source import Defines
from thinwire.kernels.cuda.structs import (
    declare,
    i32,
    i64,
    layout_of,
    make_room,
    make_rows,
    make_table,
    pointer,
)
from thinwire.kernels.cuda.toolchain import toolchain_of
from thinwire.layout import Group, RowTable
from thinwire.wire.codec import Codec

MOST_OWNERS = 128
"""Ranks that a block has counters for."""
RANGE = 4096
"""Indices of a region whose sums one block has in shared memory."""
RANGE_THREADS = 256
EMIT_WARPS = 8
FINISH_THREADS = 256
MOST_RECORDS = 30
"""Buckets that one launch settles."""
COUNTED = 3
"""Words before the entries of each slot in what is counted: bytes of empty places in both messages, and room to count."""

SplitSlot = declare(
    "SplitSlot",
    (i64, "bucket"),
    (
        i32,
        "begin end block first edge last shift start room entry keep chunk chunks range ranges unused",
    ),
)
PickChunk = declare("PickChunk", (i32, "entry count slot"))
SumRange = declare("SumRange", (i32, "begin end slot"))
RangeState = declare("RangeState", (i32, "list count end place"))
Spot = declare("Spot", (i32, "owner first"))
Cut = declare("Cut", (i32, "low last"))
SplitForm = declare("SplitForm", (i32, "head total row slots blocks rank world"))
SplitRecord = declare(
    "SplitRecord",
    (pointer, "memory offer sums lost mates slots place_slots starts"),
    (i64, "numel"),
    (SplitForm, "form"),
    (i32, "unused"),
)
SIZES: Defines = (
    ("BINS", BINS),
    ("CHUNK", BINS),
    ("RANGE", RANGE),
    ("RANGE_THREADS", RANGE_THREADS),
    ("EMIT_WARPS", EMIT_WARPS),
    ("FINISH_THREADS", FINISH_THREADS),
    ("MOST_OWNERS", MOST_OWNERS),
    ("MOST_RECORDS", MOST_RECORDS),
    *map(
        layout_of,
        (SplitSlot, PickChunk, SumRange, RangeState, Spot, Cut, Cleared, SplitForm, SplitRecord),
    ),
)
OFFER, ARRIVED, SUMS, LOST, MATES, STATS = map(
    Varying, ("offer", "arrived", "sums", "lost", "mates", "stats")
)


def split_defines(wire: torch.dtype) -> Defines:
    """For values of this dtype on the wire."""
    narrow = int(wire != torch.float32)
    return (*payload_defines(wire, torch.float32, packed=False), ("NARROW", narrow), *SIZES)


@dataclass(frozen=True, eq=False)
class SplitTables:
    """Who owns what, and where it has its place in messages, as numbers. Columns have a number for every slot."""

    edges: Sequence[int]
    """Where each slot begins in a region, and the end."""
    blocks: Sequence[int]
    """The first block of each slot, of all blocks."""
    firsts: Sequence[int]
    """The same in a region."""
    shifts: Sequence[int]
    """log2 of the size of its blocks."""
    rooms: Sequence[int]
    """Places of a slot in a message."""
    owners: Tensor
    """By block: its owner,"""
    begins: Tensor
    """and its first index there."""
    starts: Tensor
    """By owner and block of its region: the first position."""
    region_blocks: int


@dataclass(eq=False)
class SplitSent:
    """What a rank has sent in one step."""

    offer: Tensor
    """uint8 [world, bytes]: a message for each owner. Once the step is finished, entries that did not win are marked in it."""
    sums: Tensor
    """uint8 [bytes]: what this rank sends as an owner."""
    lost: Tensor
    """float32 [places]: what rounding the sums has lost and this rank keeps. Empty where nothing is rounded."""
    mates: Tensor
    """int32 [places]: this rank's own entry at the place of a winning sum. Empty likewise."""
    stats: Tensor
    """int32: bytes of empty places in `offer` and in `sums`, as float32, a word, then the entries sent of each slot."""
    finished: bool = False
    """Whether winners are known."""

    def padding(self, which: int) -> Tensor:
        return self.stats[which : which + 1].view(torch.float32)[0]


class SplitKernels:
    """The kernels of one group, behind those that pick entries. Buffers whose size shapes tell are made once."""

    def __init__(
        self,
        group: Group,
        picked: Codec,
        tables: SplitTables,
        wire: torch.dtype,
        rank: int,
        world: int,
        *,
        into_bucket: bool,
    ) -> None:
        """`picked` is the format in which entries were picked, with 32 bits for values and indices."""
        self.group, self.world, self.rank = group, world, rank
        self.into_bucket = into_bucket
        self._toolchain = toolchain_of(group.device)
        self._defines = split_defines(wire)
        self._narrow = wire != torch.float32
        slots, total = len(group.slots), sum(tables.rooms)
        entries = -(-(4 + wire.itemsize) * total // 4) * 4
        head = -(-(1 + slots) // 4) * 4
        self.head, self.total, self._sums_bytes = head, total, entries
        form = [head, total, fitting(head + entries), slots, tables.region_blocks, rank, world]
        self.form = SplitForm(*form)
        device = group.device
        self.every_slot = torch.ones(slots, dtype=torch.uint8, device=device)
        self.used = torch.zeros(slots, dtype=torch.uint8, device=device)
        self.wrong = torch.zeros((), dtype=torch.bool, device=device)
        """bool []: something was wrong in the last step."""
        self.never = torch.zeros((), dtype=torch.bool, device=device)
        self.unused = self.never
        """bool []: never up, because what was sent of unused slots returns with all that did not win."""
        self._share = torch.full((1,), 1 / world, device=device)
        self._stats_words = COUNTED + slots
        self._describe(picked, tables)
        source = ("split.cu", "split_undo", self._defines, SplitRecord, MOST_RECORDS)
        self._joint: JointKernel = joint_kernel(self._toolchain, *source, device)
        self._prepare(picked, wire)

    def _describe(self, picked: Codec, tables: SplitTables) -> None:
        """What never changes, on the device."""
        device, world = self.group.device, self.world
        chunks, ranges = cut_entries(picked.table), cut_ranges(tables.edges)
        described = describe_slots(self.group, picked.table, tables, chunks, ranges)
        self.slots = described.to(device)
        """struct SplitSlot"""
        self._chunks, self._ranges = (
            torch.cat([make_table(kind, **part) for part in parts]).to(device)
            for kind, parts in ((PickChunk, chunks), (SumRange, ranges))
        )
        self._spots = make_table(Spot, owner=tables.owners, first=tables.begins).to(device)
        self._starts = tables.starts.to(device, torch.int32)
        rooms = torch.tensor(tables.rooms)
        places = torch.arange(len(rooms)).repeat_interleave(rooms)
        self._place_slots = places.to(device, torch.int32)
        self._cleared = cut_cleared(self.group if self.into_bucket else None).to(device)

        def room(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        slots = len(rooms)
        self.counts = room(len(self._chunks), world + 1)
        """int32 [chunks, world + 1]: entries for every owner, and whether a value is not finite."""
        self._guesses = room((world + 2) * slots)
        """Of boxes, of sums, of winners: what their thresholds may be."""
        self.damaged = room(1)
        """Whether a message that arrived said what nobody sends."""
        self._states = make_room(RangeState, len(self._ranges), device)
        self._lists = room(world * self.total), room(world * self.total, dtype=torch.float32)
        self._cuts = make_room(Cut, slots, device), make_room(Cut, slots, device)

    # -- the launches -----------------------------------------------------------------------------------------

    def _launch(self, name: str, blocks: int, threads: int, args: Sequence[Any]) -> PreparedLaunch:
        kernel = self._toolchain.compile("split.cu", name, self._defines)
        return PreparedLaunch(kernel, blocks, threads, args)

    def _prepare(self, picked: Codec, wire: torch.dtype) -> None:
        form, world, slots = self.form, self.world, len(self.group.slots)
        chunks, ranges = len(self._chunks), len(self._ranges)
        of_boxes, of_sums, of_winners = self._guesses.split([world * slots, slots, slots])
        sent_cuts, winning_cuts = self._cuts
        bases, strides, *_ = picked.table._tables(self.group.device)
        entry_bytes = 4.0 + wire.itemsize
        read = [PAYLOAD, picked.values_at, picked.indices_at, bases, strides, self._spots]
        tables = [self.slots, self._chunks, self.counts]
        told = [STATS, self.wrong, self.damaged]
        self._send = [
            self._launch("split_count", chunks, BINS, [*read, *tables, world]),
            self._launch(
                "split_place",
                chunks + world * slots + 1,
                BINS,
                [
                    *(*read, *tables, of_boxes, MEMORY, OFFER, *told, form, chunks),
                    entry_bytes * world / (world - 1),
                ],
            ),
        ]
        cut, lists = [self.slots, self._ranges, self._states], self._lists
        known = [self.used, self.wrong, self.damaged, form, ranges]
        decided = [self.slots, self._states, *lists, of_sums, sent_cuts, STATS, world]
        # On average k/P of an owner's places hold a winner.
        spare = float(self.total - picked.table.entries / world)
        written = [sent_cuts, self.damaged, SUMS, LOST, MATES, STATS, form, ranges]
        self._add = [
            self._launch(
                "split_sum", ranges + 1, RANGE_THREADS, [ARRIVED, STRIDE, *cut, *lists, *known]
            ),
            self._launch("split_decide", slots, BINS, decided),
            self._launch(
                "split_emit",
                -(-ranges // EMIT_WARPS),
                32 * EMIT_WARPS,
                [*cut, *lists, *written, spare, entry_bytes],
            ),
        ]
        half = -(-world * self.total // FINISH_THREADS)
        chosen = [self.slots, self.used, of_winners, winning_cuts, OUT, self._cleared, form]
        places = [self.slots, self._place_slots, self._starts, winning_cuts, LOST, MATES]
        ended = [self.wrong, self._share, form, half, int(self.into_bucket)]
        self._finish = [
            self._launch(
                "split_choose", slots + len(self._cleared), BINS, [GATHERED, STRIDE, *chosen]
            ),
            self._launch(
                "split_finish",
                2 * half,
                FINISH_THREADS,
                [GATHERED, STRIDE, OFFER, MEMORY, OUT, *places, *ended],
            ),
        ]

    # -- one step ---------------------------------------------------------------------------------------------

    def send(self, payload: Tensor, memory: Tensor) -> SplitSent:
        """Messages to all owners out of picked entries, which `memory` does not hold; what is not sent of them returns to it."""
        device, narrow = self.group.device, self.total if self._narrow else 0
        sent = SplitSent(
            torch.empty(self.world, self.form.row, dtype=torch.uint8, device=device),
            torch.empty(self._sums_bytes, dtype=torch.uint8, device=device),
            torch.empty(narrow, device=device),
            torch.empty(narrow, dtype=torch.int32, device=device),
            torch.empty(self._stats_words, dtype=torch.int32, device=device),
        )
        values = {
            "payload": payload.data_ptr(),
            "memory": memory.data_ptr(),
            "offer": sent.offer.data_ptr(),
            "stats": sent.stats.data_ptr(),
        }
        for launch in self._send:
            launch.start(values)
        return sent

    def add_up(self, arrived: Tensor, sent: SplitSent) -> None:
        """The largest sums of what has arrived, to `sent.sums`."""
        arrived = in_words(arrived)
        values = {
            "arrived": arrived.data_ptr(),
            "stride": fitting(arrived.stride(0)),
            "sums": sent.sums.data_ptr(),
            "lost": sent.lost.data_ptr(),
            "mates": sent.mates.data_ptr(),
            "stats": sent.stats.data_ptr(),
        }
        for launch in self._add:
            launch.start(values)

    def finish(self, gathered: Tensor, sent: SplitSent, memory: Tensor, out: Tensor) -> None:
        """The mean of the winners to `out`, the bucket or a buffer of zeros; to memory what was sent and did not win."""
        gathered = in_words(gathered)
        values = {
            "gathered": gathered.data_ptr(),
            "stride": fitting(gathered.stride(0)),
            "offer": sent.offer.data_ptr(),
            "memory": memory.data_ptr(),
            "out": out.data_ptr(),
            "lost": sent.lost.data_ptr(),
            "mates": sent.mates.data_ptr(),
        }
        for launch in self._finish:
            launch.start(values)
        sent.finished = True

    def joint_entry(self, memory: Tensor, sent: SplitSent) -> Joint:
        """For a launch that takes back what was sent, of all buckets of a step."""
        rounded = self._narrow and sent.finished
        record = SplitRecord(
            memory.data_ptr(),
            sent.offer.data_ptr(),
            sent.sums.data_ptr(),
            sent.lost.data_ptr() if rounded else None,
            sent.mates.data_ptr() if rounded else None,
            self.slots.data_ptr(),
            self._place_slots.data_ptr(),
            self._starts.data_ptr(),
            self.group.numel,
            self.form,
        )
        return self._joint, record

    def give_back(self, memory: Tensor, sent: SplitSent, bad: Tensor) -> None:
        """Make memory what it was before anything was sent, if the flag is up."""
        kernel, record = self.joint_entry(memory, sent)
        kernel.settle([record], bad, self._toolchain.tuning.look_blocks)


def in_words(messages: Tensor) -> Tensor:
    """[rows, bytes], each row at a multiple of 4 bytes."""
    aligned = messages.stride(0) % 4 == 0 and messages.data_ptr() % 4 == 0
    return messages if aligned and messages.stride(1) == 1 else messages.clone()


# -- tables -----------------------------------------------------------------------------------------------------------


def cut_entries(table: RowTable) -> list[dict[str, Any]]:
    """Columns of struct PickChunk, slot by slot."""
    parts = []
    for slot, rows in enumerate(table.rows):
        starts = torch.arange(0, rows.entries, BINS)
        counts = (rows.entries - starts).clamp(max=BINS)
        parts.append({"entry": table.entry_starts[slot] + starts, "count": counts, "slot": slot})
    return parts


def cut_ranges(edges: Sequence[int]) -> list[dict[str, Any]]:
    """Columns of struct SumRange, slot by slot."""
    parts = []
    for slot, (begin, end) in enumerate(pairwise(edges)):
        begins = torch.arange(begin, end, RANGE)
        parts.append({"begin": begins, "end": (begins + RANGE).clamp(max=end), "slot": slot})
    return parts


def describe_slots(
    group: Group,
    table: RowTable,
    tables: SplitTables,
    chunks: Sequence[dict[str, Any]],
    ranges: Sequence[dict[str, Any]],
) -> Tensor:
    """struct SplitSlot of every slot."""
    rows, place, chunk, range_ = [], 0, 0, 0
    for number, (source, slot) in enumerate(zip(group.sources, group.slots, strict=True)):
        own_chunks, own_ranges = len(chunks[number]["entry"]), len(ranges[number]["begin"])
        rows.append(
            {
                "bucket": source.offset - slot.offset,
                "begin": slot.offset,
                "end": slot.offset + slot.numel,
                "block": tables.blocks[number],
                "first": tables.firsts[number],
                "edge": tables.edges[number],
                "last": tables.edges[number + 1],
                "shift": tables.shifts[number],
                "start": place,
                "room": tables.rooms[number],
                "entry": table.entry_starts[number],
                "keep": table.rows[number].entries,
                "chunk": chunk,
                "chunks": own_chunks,
                "range": range_,
                "ranges": own_ranges,
            }
        )
        place += tables.rooms[number]
        chunk, range_ = chunk + own_chunks, range_ + own_ranges
    return make_rows(SplitSlot, rows)
