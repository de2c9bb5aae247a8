"""QuantizedKernels: quantised sums on CUDA. Everything up to sending is one pass over a bucket; sums and updates are one each.

Reference: `QuantizedSum` in thinwire/exchange/quantized.py. The bits are the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.cuda.joint import Joint, JointKernel, joint_kernel
from thinwire.kernels.cuda.launch import PreparedLaunch, Varying, fitting
from thinwire.kernels.cuda.prepared import BEFORE, BUCKET, MEMORY, OUT, RATIO, STRIDE
from thinwire.kernels.cuda.source import FLOAT_CODES, Defines
from thinwire.kernels.cuda.structs import (
    declare,
    i32,
    i64,
    layout_of,
    make_room,
    make_table,
    pointer,
)
from thinwire.kernels.cuda.toolchain import toolchain_of
from thinwire.layout import Group, OwnedBlocks
from thinwire.wire.quantize import FIRST_CUT, LLOYD_ROUNDS, BlockQuantizer, MessageLayout

BLOCKS = (64, 128, 256)
"""Sizes that the kernels know."""
PIECE_BLOCKS = 32
"""Blocks that one block of threads has."""
AHEAD = 4
THREADS = 32 * PIECE_BLOCKS // AHEAD
OPEN_THREADS = 256
MOST_RECORDS = 50
"""Buckets that one launch settles."""
QuantPiece = declare(
    "QuantPiece", (i64, "bucket memory"), (i32, "place count slot owner block aligned")
)
MessageForm = declare("MessageForm", (i32, "row scales codes slots"))
QuantRecord = declare(
    "QuantRecord",
    (pointer, "memory offer own pieces used unused"),
    (MessageForm, "form"),
    (i32, "count rank"),
)
LAYOUTS: Defines = (
    ("PIECE_BLOCKS", PIECE_BLOCKS),
    ("MOST_RECORDS", MOST_RECORDS),
    layout_of(QuantPiece),
    layout_of(MessageForm),
    layout_of(QuantRecord),
)
OFFER, OWN, ARRIVED, SUMS, GATHERED = map(Varying, ("offer", "own", "arrived", "sums", "gathered"))


def quantize_defines(
    bits: int, block: int, gradients: torch.dtype, *, stochastic: bool, keeps: bool
) -> Defines:
    return (
        ("GRADIENT_CODE", FLOAT_CODES[gradients]),
        ("BITS", bits),
        ("BLOCK", block),
        ("PEAK", max(1, (1 << (bits - 1)) - 1)),
        ("STOCHASTIC", int(stochastic)),
        ("KEEPS", int(keeps)),
        ("FIRST_CUT", FIRST_CUT),
        ("LLOYD_ROUNDS", LLOYD_ROUNDS),
        *LAYOUTS,
    )


@dataclass(frozen=True, eq=False)
class SentCodes:
    """What a rank has sent in one step."""

    offer: Tensor
    """uint8 [world, bytes]: a row for each owner."""
    sums: Tensor
    """uint8 [bytes]: what this rank sends as an owner."""
    own: Tensor
    """float32: this rank's own blocks, before anything was added."""


class QuantizedKernels:
    """The kernels of one group. Buffers whose size shapes tell are made once."""

    def __init__(
        self,
        group: Group,
        owned: OwnedBlocks,
        quantizer: BlockQuantizer,
        messages: tuple[MessageLayout, MessageLayout],
        rank: int,
        gradient_dtype: torch.dtype,
        *,
        stochastic: bool,
        keeps: bool,
    ) -> None:
        """`messages` are what a rank sends to an owner, and an owner to all. Without `keeps` nothing is held back."""
        self.group = group
        self.world, self.rank = owned.owners, rank
        self.into_bucket = gradient_dtype == torch.float32
        """Whether updates are written into the bucket itself."""
        self._offer, self._sums = messages
        self._stochastic = stochastic
        self._room = owned.width * owned.size
        self._defines = quantize_defines(
            quantizer.bits, owned.size, gradient_dtype, stochastic=stochastic, keeps=keeps
        )
        self._toolchain = toolchain_of(group.device)
        slots, device = len(group.slots), group.device
        self._one = torch.ones(1, device=device)
        self._share = torch.full((1,), 1 / self.world, device=device)
        names = [zlib.crc32(slot.name.encode()) for slot in group.slots]
        self._seeds = torch.tensor(names, dtype=torch.int64).to(torch.int32).to(device)
        self._steps = torch.zeros(slots, dtype=torch.int32, device=device)
        """How often each slot has been exchanged; kernels count on."""
        self._expected: Sequence[int] = ()
        """What the next step should count from; another number is told to the device."""
        self.every_slot = torch.ones(slots, dtype=torch.uint8, device=device)
        self.used = torch.zeros(slots, dtype=torch.uint8, device=device)
        self._status = torch.zeros(2, dtype=torch.bool, device=device)
        self.wrong, self.unused = self._status.unbind()
        """bool [] each: something was wrong in the last step; no rank had a gradient for some slot."""
        self.never = torch.zeros((), dtype=torch.bool, device=device)
        self._pieces = cut_pieces(group, owned).to(device)
        self._own_pieces = cut_pieces(group, owned, rank).to(device)
        self._form = _form(self._offer, slots)
        source = ("quantize.cu", "quantize_return", self._defines, QuantRecord, MOST_RECORDS)
        self._joint: JointKernel = joint_kernel(self._toolchain, *source, device)
        self._prepare()

    def _launch(
        self, name: str, blocks: int, args: Sequence[object], threads: int = THREADS
    ) -> PreparedLaunch:
        kernel = self._toolchain.compile("quantize.cu", name, self._defines)
        return PreparedLaunch(kernel, blocks, threads, args)

    def _prepare(self) -> None:
        form, sums_form = self._form, _form(self._sums, len(self.group.slots))
        who, drawn = [self.rank, self.world], [self._seeds, self._steps]
        opened = [OFFER, SUMS, self._steps, self._status, form, self.world]
        self._open = self._launch("quantize_open", 1, opened, OPEN_THREADS)
        sent = [BUCKET, BEFORE, MEMORY, OFFER, OWN, self._pieces, RATIO, *drawn, form, *who]
        self._send = self._launch("quantize_send", len(self._pieces), sent)
        own = len(self._own_pieces)
        read = [ARRIVED, OWN, MEMORY, SUMS, self._own_pieces, *drawn]
        known = [self.used, self._status, form, sums_form, *who, own]
        self._add = self._launch("quantize_sum", own + 1, [*read, *known])
        into = [self._status, self._share, sums_form, STRIDE, self.world, int(self.into_bucket)]
        out = [GATHERED, OUT, self._pieces, *into]
        self._deliver = self._launch("quantize_deliver", len(self._pieces), out)

    # -- one step ---------------------------------------------------------------------------------------------

    def send(
        self,
        bucket_flat: Tensor,
        before: Tensor,
        memory: Tensor,
        ratio: Tensor | None,
        counts: Sequence[int],
    ) -> SentCodes:
        """What is sent, and this rank's own blocks. `memory` becomes what is left of `before` x `ratio` + the gradient."""
        if self._stochastic:
            if self._expected != counts:
                self._steps.copy_(torch.tensor(counts, dtype=torch.int32) - 1)
            self._expected = [count + 1 for count in counts]
        device = self.group.device
        offer = torch.empty(self.world, self._offer.nbytes, dtype=torch.uint8, device=device)
        sums = torch.empty(self._sums.nbytes, dtype=torch.uint8, device=device)
        own = torch.empty(self._room, device=device)
        values = {
            "bucket": bucket_flat.data_ptr(),
            "before": before.data_ptr(),
            "memory": memory.data_ptr(),
            "offer": offer.data_ptr(),
            "sums": sums.data_ptr(),
            "own": own.data_ptr(),
            "ratio": (self._one if ratio is None else ratio).data_ptr(),
        }
        self._open.start(values)
        self._send.start(values)
        return SentCodes(offer, sums, own)

    def add_up(self, arrived: Tensor, sent: SentCodes, memory: Tensor) -> None:
        """Sum what has arrived with this rank's own blocks into `sent.sums`. Sets `used`, `unused` and `wrong`."""
        self._add.start(
            {
                "arrived": arrived.data_ptr(),
                "own": sent.own.data_ptr(),
                "memory": memory.data_ptr(),
                "sums": sent.sums.data_ptr(),
            }
        )

    def deliver(self, gathered: Tensor, out: Tensor) -> None:
        """Write the mean to the bucket, or to a buffer in the group's layout. `wrong` tells of overflows too."""
        self._deliver.start(
            {
                "gathered": gathered.data_ptr(),
                "out": out.data_ptr(),
                "stride": fitting(gathered.stride(0)),
            }
        )

    def joint_entry(self, memory: Tensor, sent: SentCodes, used: Tensor, unused: Tensor) -> Joint:
        """For a launch that takes back what was sent, of all buckets of a step."""
        record = QuantRecord(
            memory.data_ptr(),
            sent.offer.data_ptr(),
            sent.own.data_ptr(),
            self._pieces.data_ptr(),
            used.data_ptr(),
            unused.data_ptr(),
            self._form,
            len(self._pieces),
            self.rank,
        )
        return self._joint, record

    def give_back(
        self, memory: Tensor, sent: SentCodes, used: Tensor, bad: Tensor, unused: Tensor
    ) -> None:
        """Return what was sent: of used slots if the flag `bad` is up, of the others if `unused` is."""
        kernel, record = self.joint_entry(memory, sent, used, unused)
        kernel.settle([record], bad, self._toolchain.tuning.look_blocks)


def _form(message: MessageLayout, slots: int) -> object:
    return MessageForm(fitting(message.nbytes), message.scales_at, message.codes_at, slots)


def cut_pieces(group: Group, owned: OwnedBlocks, owner: int | None = None) -> Tensor:
    """struct QuantPiece of every part of every run; of one owner, or of all."""
    most = PIECE_BLOCKS * owned.size
    tables = [make_room(QuantPiece, 0, torch.device("cpu"))]
    for run, first in zip(owned.runs, owned.firsts, strict=True):
        if owner is not None and run.owner != owner:
            continue
        starts = torch.arange(0, run.elements, most)
        places = run.first * owned.size + starts
        bucket = group.sources[run.slot].offset + places
        tables.append(
            make_table(
                QuantPiece,
                bucket=bucket,
                memory=group.slots[run.slot].offset + places,
                place=places,
                count=(run.elements - starts).clamp(max=most),
                slot=run.slot,
                owner=run.owner,
                block=first % owned.width + starts // owned.size,
                aligned=(bucket % 4 == 0).long(),
            )
        )
    return torch.cat(tables)
