"""AgreedKernels: values at agreed places taken out of memory, added up by owners, and delivered (agreed.cu).

Reference: `contribute` in thinwire/exchange/agreed.py. The bits are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.cuda.clear import cut_cleared
from thinwire.kernels.cuda.entries import PIECE_THREADS, entries_defines
from thinwire.kernels.cuda.joint import Joint, JointKernel, joint_kernel
from thinwire.kernels.cuda.launch import Kernel, PreparedLaunch, fitting
from thinwire.kernels.cuda.prepared import BUCKET, payload_defines
from thinwire.kernels.cuda.source import Defines
from thinwire.kernels.cuda.structs import declare, i32, i64, layout_of, pointer
from thinwire.kernels.cuda.toolchain import toolchain_of
from thinwire.layout import Group

ENTRY_THREADS = 256
MOST_RECORDS = 40
"""Buckets that one launch settles."""
COUNTED = 2
"""Words before the entries of each slot in what is counted: empty places of other ranks' rows, and of this rank's own."""
AgreedForm = declare("AgreedForm", (i64, "numel"), (i32, "count width rank slots"))
AgreedRecord = declare(
    "AgreedRecord", (pointer, "memory places kept lost begins used"), (AgreedForm, "form")
)


def agreed_defines(wire: torch.dtype) -> Defines:
    """For values of this dtype on the wire."""
    return (
        *payload_defines(wire, torch.float32, packed=False),
        ("ENTRY_THREADS", ENTRY_THREADS),
        ("MOST_RECORDS", MOST_RECORDS),
        layout_of(AgreedForm),
        layout_of(AgreedRecord),
    )


@dataclass(eq=False)
class AgreedSent:
    """What was taken out of memory in one step."""

    places: Tensor
    """int64 [m] or [world, m]"""
    message: Tensor
    """The values there in the wire's dtype; a sum over ranks may be made in place."""
    kept: Tensor
    """The same numbers, which stay."""
    stats: Tensor
    """int32: empty places of other ranks' rows, of this rank's own, then the entries of each slot."""
    lost: Tensor | None = None
    """float32 [m]: what rounding lost of the sums that this rank owns, once they are there."""
    used: Tensor | None = None
    """bool [slots]: some rank had a gradient; None until the update was delivered."""

    @property
    def counts(self) -> Tensor:
        """int32 [slots]: entries that this rank sent."""
        return self.stats[COUNTED:]


class AgreedKernels:
    """The kernels of one group. Narrower gradients need the exact update, to keep what rounding loses: that is no bucket then."""

    def __init__(
        self, group: Group, wire: torch.dtype, rank: int, world: int, *, into_bucket: bool
    ) -> None:
        self.group, self.world, self.into_bucket = group, world, into_bucket
        device, slots = group.device, len(group.slots)
        self._wire = wire
        self._rank = rank if wire != torch.float32 else -1
        toolchain, defines = toolchain_of(device), agreed_defines(wire)
        self._look_blocks = toolchain.tuning.look_blocks
        self._take, self._add, self._deliver = (
            toolchain.compile("agreed.cu", name, defines)
            for name in ("take_entries", "add_entries", "deliver_entries")
        )
        source = ("agreed.cu", "undo_entries", defines, AgreedRecord, MOST_RECORDS)
        self._joint: JointKernel = joint_kernel(toolchain, *source, device)
        self.every_slot = torch.ones(slots, dtype=torch.uint8, device=device)
        self.used = self.every_slot
        self.never = torch.zeros((), dtype=torch.bool, device=device)
        self.unused = self.never
        """bool []: never up, because what was sent of unused slots returns when the update is delivered."""
        self.wrong = torch.zeros((), dtype=torch.bool, device=device)
        """bool []: a mean of the last step is not finite."""
        self._begins = torch.tensor([slot.offset for slot in group.slots], device=device)
        sources = torch.tensor([slot.offset for slot in group.sources], device=device)
        moved = sources - self._begins
        self._into_out = moved if into_bucket else torch.zeros_like(moved)
        self._share = torch.full((1,), 1 / world, device=device)
        cleared = cut_cleared(group).to(device)
        clear = toolchain.compile("entries.cu", "clear_bucket", entries_defines(torch.float32))
        self._clear = PreparedLaunch(
            clear, len(cleared), PIECE_THREADS, [BUCKET, cleared, self.wrong]
        )

    def take(self, memory: Tensor, places: Tensor) -> AgreedSent:
        """The values at flat positions, each once (outside the group is nowhere), as the wire rounds them; memory keeps the rest."""
        places = places.contiguous()
        message = torch.empty(places.shape, dtype=self._wire, device=places.device)
        # Nobody writes to what owners add, but a sum over ranks may come back in the same memory.
        kept = torch.empty_like(message) if self._rank < 0 else message
        words = COUNTED + len(self.group.slots)
        stats = torch.zeros(words, dtype=torch.int32, device=places.device)
        sent = AgreedSent(places, message, kept, stats)
        self._start(
            self._take, sent, [places, memory, message, kept, self._begins, stats, self._form(sent)]
        )
        return sent

    def add_up(self, arrived: Tensor, sent: AgreedSent) -> tuple[Tensor, Tensor]:
        """(the sum of what arrived for this owner [world, m] as it is gathered, what rounding lost)."""
        arrived = arrived.contiguous()
        world, width = arrived.shape
        sums = torch.empty(width, dtype=self._wire, device=arrived.device)
        sent.lost = torch.empty(width, device=arrived.device)
        args = [arrived, sums, sent.lost, fitting(width), world]
        if width:
            self._add(-(-width // ENTRY_THREADS), ENTRY_THREADS, args)
        return sums, sent.lost

    def deliver(
        self, summed: Tensor, sent: AgreedSent, used: Tensor, memory: Tensor, bucket_flat: Tensor
    ) -> Tensor:
        """The mean of the sums, and zero elsewhere, to the bucket or a new dense update, which is returned. Sets `wrong`."""
        if self.into_bucket:
            self._clear.start({"bucket": bucket_flat.data_ptr()})
            out = bucket_flat
        else:
            self.wrong.zero_()
            out = torch.zeros(self.group.numel, device=bucket_flat.device)
        summed, sent.used = summed.contiguous(), used.contiguous()
        lost = self._share if sent.lost is None else sent.lost
        read = [sent.places, summed, sent.kept, lost, memory, out, self._begins, self._into_out]
        told = [sent.used, self.wrong, self._share, self._form(sent)]
        self._start(self._deliver, sent, [*read, *told])
        return out

    def joint_entry(self, memory: Tensor, sent: AgreedSent) -> Joint:
        """For a launch that takes back what was sent, of all buckets of a step."""
        finished = sent.used is not None
        record = AgreedRecord(
            memory.data_ptr(),
            sent.places.data_ptr(),
            sent.kept.data_ptr(),
            sent.lost.data_ptr() if finished and sent.lost is not None else None,
            self._begins.data_ptr(),
            sent.used.data_ptr() if sent.used is not None else None,
            self._form(sent),
        )
        return self._joint, record

    def give_back(self, memory: Tensor, sent: AgreedSent, bad: Tensor) -> None:
        """Make memory what it was before anything was sent, if the flag is up."""
        kernel, record = self.joint_entry(memory, sent)
        kernel.settle([record], bad, self._look_blocks)

    def add_accepted(self, sent: AgreedSent, total: Tensor) -> None:
        """Add what was sent and not given back to `total` [numel]; for tests and measurements."""
        taken = (sent.places >= 0) & (sent.places < self.group.numel)
        positions = torch.where(taken, sent.places, 0)
        if sent.used is not None:
            taken &= sent.used[torch.bucketize(positions, self._begins, right=True) - 1]
        values = torch.where(taken, sent.kept.float(), 0.0)
        total.index_add_(0, positions.view(-1), values.view(-1))
        if sent.used is not None and sent.lost is not None:
            kept = taken[self._rank] & sent.lost.isfinite()
            lost = torch.where(kept, sent.lost, 0.0)
            total.index_add_(0, positions[self._rank], lost, alpha=-1)

    def _form(self, sent: AgreedSent) -> ctypes.Structure:
        count, width = sent.places.numel(), max(1, sent.places.shape[-1])
        sizes = [fitting(count), fitting(width), self._rank, len(self.group.slots)]
        return AgreedForm(self.group.numel, *sizes)

    def _start(self, kernel: Kernel, sent: AgreedSent, args: Sequence[Any]) -> None:
        count = sent.places.numel()
        if count:
            kernel(-(-count // ENTRY_THREADS), ENTRY_THREADS, args)
