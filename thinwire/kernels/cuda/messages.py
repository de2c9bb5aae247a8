"""MessageKernels: entries that kernels have picked become messages, and sums that come back become the update (split.cu).

References: `SplitStep` in thinwire/exchange/split.py, `MergeStep` in thinwire/exchange/tree.py. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.cuda.chunks import BINS
from thinwire.kernels.cuda.clear import cut_cleared
from thinwire.kernels.cuda.joint import Joint, JointKernel, joint_kernel
from thinwire.kernels.cuda.launch import PreparedLaunch, Varying, fitting
from thinwire.kernels.cuda.prepared import GATHERED, MEMORY, OUT, PAYLOAD, STRIDE
from thinwire.kernels.cuda.source import Defines
from thinwire.kernels.cuda.split_tables import (
    FINISH_THREADS,
    MOST_RECORDS,
    Columns,
    Cut,
    PickChunk,
    RangeState,
    SplitForm,
    SplitRecord,
    SplitTables,
    Spot,
    SumRange,
    cut_entries,
    describe_slots,
    slots_of,
    split_defines,
)
from thinwire.kernels.cuda.structs import make_room, make_table
from thinwire.kernels.cuda.toolchain import toolchain_of
from thinwire.layout import Group
from thinwire.wire.codec import Codec

COUNTED = 3
"""Words before the entries of each slot in what is counted: bytes of empty places in both messages, and room to count."""
OFFER, SUMS, LOST, MATES, STATS = map(Varying, ("offer", "sums", "lost", "mates", "stats"))


@dataclass(eq=False)
class MessagesSent:
    """What a rank has sent in one step."""

    offer: Tensor
    """uint8 [owners, bytes]: a message for each owner. Once the step is finished, entries that did not win are marked in it."""
    sums: Tensor
    """uint8 [bytes]: what this rank sends as an owner."""
    lost: Tensor
    """float32 [places]: what rounding the sums has lost and this rank keeps. Empty where it keeps nothing."""
    mates: Tensor
    """int32 [places]: this rank's own entry at the place of a winning sum. Empty likewise."""
    stats: Tensor
    """int32: bytes of empty places in `offer` and in `sums`, as float32, a word, then the entries sent of each slot."""
    finished: bool = False
    """Whether winners are known."""

    def padding(self, which: int) -> Tensor:
        return read_float(self.stats, which)


class MessageKernels:
    """The kernels of one group, behind those that pick entries. Buffers whose size shapes tell are made once."""

    lists: int
    """Messages of entries that are added up together."""

    def __init__(
        self,
        group: Group,
        picked: Codec,
        tables: SplitTables,
        wire: torch.dtype,
        ranges: Sequence[Columns],
        *,
        rank: int,
        owners: int,
        world: int,
        into_bucket: bool,
    ) -> None:
        """`picked` is the format in which entries were picked, with 32 bits for values and indices. `ranges` are columns of struct
        SumRange, slot by slot. `rank` is -1 where this rank owns nothing by itself."""
        self.group, self.owners, self.world = group, owners, world
        self.into_bucket = into_bucket
        self._toolchain = toolchain_of(group.device)
        self._defines: Defines = split_defines(wire)
        self._narrow = wire != torch.float32
        self.entry_bytes = 4 + wire.itemsize
        slots, device = len(group.slots), group.device
        self.total, self.back = sum(tables.rooms), sum(tables.back)
        self.head = in_whole_words(1 + slots)
        row = fitting(self.head + in_whole_words(self.entry_bytes * self.total))
        sizes = [self.head, self.total, row, self.back, slots, tables.region_blocks]
        self.form = SplitForm(*sizes, rank, owners)
        self.every_slot = torch.ones(slots, dtype=torch.uint8, device=device)
        self.used = torch.zeros(slots, dtype=torch.uint8, device=device)
        self._no_slot = torch.zeros_like(self.used)
        self.wrong = torch.zeros((), dtype=torch.bool, device=device)
        """bool []: something was wrong in the last step."""
        self.never = torch.zeros((), dtype=torch.bool, device=device)
        self.unused = self.never
        """bool []: never up, because what was sent of unused slots returns with all that did not win."""
        self._share = torch.full((1,), 1 / world, device=device)
        self._stats_words = COUNTED + slots
        self._describe(picked, tables, ranges)
        source = ("split.cu", "split_undo", self._defines, SplitRecord, MOST_RECORDS)
        self._joint: JointKernel = joint_kernel(self._toolchain, *source, device)
        self._prepare(picked)

    def _describe(self, picked: Codec, tables: SplitTables, ranges: Sequence[Columns]) -> None:
        """What never changes, on the device."""
        device = self.group.device
        chunks = cut_entries(picked.table)
        described = describe_slots(self.group, picked.table, tables, chunks, ranges)
        self.slots = described.to(device)
        """struct SplitSlot"""
        self._chunks, self._ranges = (
            torch.cat([make_table(kind, **part) for part in parts]).to(device)
            for kind, parts in ((PickChunk, chunks), (SumRange, ranges))
        )
        self._spots = make_table(Spot, owner=tables.owners, first=tables.begins).to(device)
        self._starts = tables.starts.to(device, torch.int32)
        self._place_slots, self._back_slots = (
            slots_of(rooms, device) for rooms in (tables.rooms, tables.back)
        )
        self._cleared = cut_cleared(self.group if self.into_bucket else None).to(device)
        slots = len(tables.rooms)
        self.counts = self._room(len(self._chunks), self.owners + 1)
        """int32 [chunks, owners + 1]: entries for every owner, and whether a value is not finite."""
        self._guesses = self._room((self.owners + 2) * slots)
        """Of boxes, of sums, of winners: what their thresholds may be."""
        self.damaged = self._room(1)
        """Whether a message that arrived said what nobody sends."""
        self._states = make_room(RangeState, len(self._ranges), device)
        self._lists = self._room(self.lists * self.total), self._sums_of(self.lists * self.total)
        self._cuts = make_room(Cut, slots, device), make_room(Cut, slots, device)

    def _room(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=self.group.device)

    def _sums_of(self, places: int) -> Tensor:
        return torch.zeros(places, device=self.group.device)

    @property
    def settled(self) -> Tensor:
        """uint8 [slots]: of which nothing that was sent returns, whether it won or not."""
        return self._no_slot

    # -- the launches -----------------------------------------------------------------------------------------

    def _launch(self, name: str, blocks: int, threads: int, args: Sequence[Any]) -> PreparedLaunch:
        kernel = self._toolchain.compile("split.cu", name, self._defines)
        return PreparedLaunch(kernel, blocks, threads, args)

    def _prepare(self, picked: Codec) -> None:
        form, owners, slots = self.form, self.owners, len(self.group.slots)
        chunks = len(self._chunks)
        of_boxes, self._of_sums, of_winners = self._guesses.split([owners * slots, slots, slots])
        winning_cuts = self._cuts[1]
        bases, strides, *_ = picked.table._tables(self.group.device)
        read = [PAYLOAD, picked.values_at, picked.indices_at, bases, strides, self._spots]
        tables = [self.slots, self._chunks, self.counts]
        told = [STATS, self.wrong, self.damaged]
        # A message to oneself does not travel.
        travels = float(self.entry_bytes) * (1 if owners == 1 else owners / (owners - 1))
        self._send = [
            self._launch("split_count", chunks, BINS, [*read, *tables, owners]),
            self._launch(
                "split_place",
                chunks + owners * slots + 1,
                BINS,
                [*read, *tables, of_boxes, MEMORY, OFFER, *told, form, chunks, travels],
            ),
        ]
        gathered, sent = (
            -(-owners * places // FINISH_THREADS) for places in (self.back, self.total)
        )
        chosen = [self.slots, self.used, of_winners, winning_cuts, OUT, self._cleared, form]
        places = [self.slots, self._place_slots, self._back_slots, self._starts, winning_cuts]
        ended = [
            self.settled,
            LOST,
            MATES,
            self.wrong,
            self._share,
            form,
            gathered,
            int(self.into_bucket),
        ]
        self._finish = [
            self._launch(
                "split_choose", slots + len(self._cleared), BINS, [GATHERED, STRIDE, *chosen]
            ),
            self._launch(
                "split_finish",
                gathered + sent,
                FINISH_THREADS,
                [GATHERED, STRIDE, OFFER, MEMORY, OUT, *places, *ended],
            ),
        ]

    # -- one step ---------------------------------------------------------------------------------------------

    def place(
        self, payload: Tensor, memory: Tensor, sums_bytes: int, kept_places: int
    ) -> MessagesSent:
        """Messages to all owners out of picked entries, which `memory` does not hold; what is not sent of them returns to it."""
        device = self.group.device
        sent = MessagesSent(
            torch.empty(self.owners, self.form.row, dtype=torch.uint8, device=device),
            torch.empty(sums_bytes, dtype=torch.uint8, device=device),
            torch.empty(kept_places, device=device),
            torch.empty(kept_places, dtype=torch.int32, device=device),
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

    def finish(self, gathered: Tensor, sent: MessagesSent, memory: Tensor, out: Tensor) -> None:
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

    def joint_entry(self, memory: Tensor, sent: MessagesSent) -> Joint:
        """For a launch that takes back what was sent, of all buckets of a step."""
        rounded = sent.finished and bool(sent.lost.numel())
        record = SplitRecord(
            memory.data_ptr(),
            sent.offer.data_ptr(),
            sent.sums.data_ptr(),
            sent.lost.data_ptr() if rounded else None,
            sent.mates.data_ptr() if rounded else None,
            self.slots.data_ptr(),
            self._place_slots.data_ptr(),
            self._back_slots.data_ptr(),
            self._starts.data_ptr(),
            self.group.numel,
            self.form,
        )
        return self._joint, record

    def give_back(self, memory: Tensor, sent: MessagesSent, bad: Tensor) -> None:
        """Make memory what it was before anything was sent, if the flag is up."""
        kernel, record = self.joint_entry(memory, sent)
        kernel.settle([record], bad, self._toolchain.tuning.look_blocks)


def in_whole_words(count: int) -> int:
    return -(-count // 4) * 4


def read_float(words: Tensor, which: int) -> Tensor:
    """One of int32 words, as the float32 that a kernel has written there."""
    return words[which : which + 1].view(torch.float32)[0]


def in_words(messages: Tensor) -> Tensor:
    """[rows, bytes], each row at a multiple of 4 bytes."""
    aligned = messages.stride(0) % 4 == 0 and messages.data_ptr() % 4 == 0
    return messages if aligned and messages.stride(1) == 1 else messages.clone()
