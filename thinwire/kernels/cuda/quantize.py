"""QuantizedKernels: quantised sums on CUDA. Everything up to sending is one pass over a bucket; sums and updates are one each.

Reference: `QuantizedSum` in thinwire/exchange/quantized.py. The bits are the same.

Bytes per element that a step has to move, beside codes: 16 (gradient, residual read and written, update), and in Adam's scale 12 more
(momentum read and written, second moment). Among P ranks the kernels move 8 / P on top, because an owner's blocks are written and read
once more, and in Adam's scale another 4, because the update needs the second moment again.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from thinwire.kernels.cuda.joint import Joint, JointKernel, joint_kernel
from thinwire.kernels.cuda.launch import PreparedLaunch, Varying, fitting
from thinwire.kernels.cuda.prepared import (
    BEFORE,
    BUCKET,
    MEMORY,
    MOMENTUM_NAMES,
    OUT,
    RATIO,
    SCALE_NAMES,
    STRIDE,
)
from thinwire.kernels.cuda.source import FLOAT_CODES, Defines
from thinwire.kernels.cuda.structs import (
    declare,
    f32,
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
MOST_RECORDS = 45
"""Buckets that one launch settles."""
QuantPiece = declare(
    "QuantPiece", (i64, "bucket memory"), (i32, "place count slot owner block aligned")
)
MessageForm = declare("MessageForm", (i32, "row scales codes slots"))
QuantRecord = declare(
    "QuantRecord",
    (pointer, "memory offer own pieces used unused second_moment"),
    (MessageForm, "form"),
    (i32, "count rank"),
    (f32, "eps"),
)
LAYOUTS: Defines = (
    ("PIECE_BLOCKS", PIECE_BLOCKS),
    ("MOST_RECORDS", MOST_RECORDS),
    layout_of(QuantPiece),
    layout_of(MessageForm),
    layout_of(QuantRecord),
)
OFFER, OWN, ARRIVED, SUMS, GATHERED = map(Varying, ("offer", "own", "arrived", "sums", "gathered"))
SECOND_MOMENT, LOSS_SCALE = map(Varying, SCALE_NAMES)


@dataclass(frozen=True)
class Scaling:
    """Adam's step before compression: u = beta u + (1 - beta) g; c = residual + u; codes of c / (sqrt(v) + eps)."""

    beta: float
    eps: float
    limit: float | None = None
    """The most that a rank sends of an element, in units of its divisor."""


def quantize_defines(
    bits: int,
    block: int,
    gradients: torch.dtype,
    *,
    stochastic: bool,
    keeps: bool,
    sum_bits: int | None = None,
    scaled: bool = False,
) -> Defines:
    """Sums have `sum_bits`; None = as many as what is sent. `scaled`: with Adam's momentum, in Adam's scale."""
    return (
        ("GRADIENT_CODE", FLOAT_CODES[gradients]),
        ("BITS_SENT", bits),
        ("BITS_OF_SUMS", bits if sum_bits is None else sum_bits),
        ("BLOCK", block),
        ("STOCHASTIC", int(stochastic)),
        ("KEEPS", int(keeps)),
        ("ADAM", int(scaled)),
        ("FIRST_CUT", FIRST_CUT),
        ("LLOYD_ROUNDS", LLOYD_ROUNDS),
        *LAYOUTS,
    )


@dataclass(eq=False)
class SentCodes:
    """What a rank sends in one step."""

    offer: Tensor
    """uint8 [world, bytes]: a row for each owner."""
    sums: Tensor
    """uint8 [bytes]: what this rank sends as an owner."""
    own: Tensor
    """float32: this rank's own blocks, before anything was added."""
    second_moment: Tensor | None = None
    """v, in whose scale it was sent; None if in none."""

    def addresses(self) -> dict[str, int]:
        """For launches."""
        found = {
            "offer": self.offer.data_ptr(),
            "sums": self.sums.data_ptr(),
            "own": self.own.data_ptr(),
        }
        if self.second_moment is not None:
            found["second_moment"] = self.second_moment.data_ptr()
        return found


class QuantizedKernels:
    """The kernels of one group. Buffers whose size shapes tell are made once."""

    def __init__(
        self,
        group: Group,
        owned: OwnedBlocks,
        quantizers: tuple[BlockQuantizer, BlockQuantizer],
        messages: tuple[MessageLayout, MessageLayout],
        rank: int,
        gradient_dtype: torch.dtype,
        *,
        stochastic: bool,
        keeps: bool,
        scaling: Scaling | None = None,
    ) -> None:
        """`quantizers` and `messages` are those of what a rank sends to an owner, and an owner to all.

        Without `keeps` nothing is held back. With a `scaling` momentum is kept too, and codes are in its scale.
        """
        self.group = group
        self.world, self.rank = owned.owners, rank
        self.into_bucket = gradient_dtype == torch.float32
        """Whether updates are written into the bucket itself."""
        self._offer, self._sums = messages
        self._stochastic = stochastic
        self._scaling = scaling
        self._room = owned.width * owned.size
        sent, summed = (quantizer.bits for quantizer in quantizers)
        self._defines = quantize_defines(
            sent,
            owned.size,
            gradient_dtype,
            stochastic=stochastic,
            keeps=keeps,
            sum_bits=summed,
            scaled=scaling is not None,
        )
        self._toolchain = toolchain_of(group.device)
        slots, device = len(group.slots), group.device
        self._one = torch.ones(1, device=device)
        self._share = torch.full((1,), 1 / self.world, device=device)
        self._limits = torch.zeros(2, device=device)
        """Of what is sent and of sums, in the units of the step's gradients."""
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
        limits, momentum, scale = self._scaling_arguments()
        opened = [OFFER, SUMS, self._steps, self._status, form, self.world, *limits]
        self._open = self._launch("quantize_open", 1, opened, OPEN_THREADS)
        pieces, own = len(self._pieces), len(self._own_pieces)
        sent = [BUCKET, BEFORE, MEMORY, OFFER, OWN, self._pieces, RATIO, *drawn, form, *who]
        self._send = self._launch("quantize_send", pieces, [*sent, *momentum, *scale])
        read = [ARRIVED, OWN, MEMORY, SUMS, self._own_pieces, *drawn]
        known = [self.used, self._status, form, sums_form, *who, own]
        self._add = self._launch("quantize_sum", own + 1, [*read, *known, *scale])
        into = [self._status, self._share, sums_form, STRIDE, self.world, int(self.into_bucket)]
        out = [GATHERED, OUT, self._pieces, *into, *scale]
        self._deliver = self._launch("quantize_deliver", pieces, out)
        if self._scaling is None:
            return
        collected = [BUCKET, BEFORE, MEMORY, OFFER, self._pieces, RATIO, form, self.world]
        self._collect = self._launch("quantize_collect", pieces, [*collected, *momentum])
        later = [MEMORY, OFFER, OWN, self._pieces, *drawn, form, self.rank]
        self._send_collected = self._launch("quantize_send_collected", pieces, [*later, *scale])

    def _scaling_arguments(self) -> tuple[list[object], list[object], list[object]]:
        """What adam.cuh adds to the parameters of kernels: for limits, for the momentum, for the scale."""
        scaling = self._scaling
        if scaling is None:
            return [], [], []
        limit = inf if scaling.limit is None else scaling.limit
        limits = [LOSS_SCALE, float(limit), float(limit * self.world), self._limits]
        momentum = [*map(Varying, MOMENTUM_NAMES), float(scaling.beta), float(1 - scaling.beta)]
        return limits, momentum, [SECOND_MOMENT, float(scaling.eps), self._limits]

    # -- one step ---------------------------------------------------------------------------------------------

    def begin(self, counts: Sequence[int], scale: Tensor | None = None) -> SentCodes:
        """Room for what a step sends, its flags down. `scale` is the GradScaler's."""
        if self._stochastic:
            if self._expected != counts:
                self._steps.copy_(torch.tensor(counts, dtype=torch.int32) - 1)
            self._expected = [count + 1 for count in counts]
        device = self.group.device
        sent = SentCodes(
            torch.empty(self.world, self._offer.nbytes, dtype=torch.uint8, device=device),
            torch.empty(self._sums.nbytes, dtype=torch.uint8, device=device),
            torch.empty(self._room, device=device),
        )
        units = None if scale is None else scale.float()
        loss_scale = 0 if units is None else units.data_ptr()
        self._open.start({**sent.addresses(), "loss_scale": loss_scale})
        return sent

    def send(
        self,
        sent: SentCodes,
        bucket_flat: Tensor,
        before: Tensor,
        memory: Tensor,
        ratio: Tensor | None,
        momentum: Sequence[Tensor] = (),
    ) -> None:
        """Write what is sent. `memory` becomes what is left of `before` x `ratio` + the gradient, or the momentum."""
        self._send.start(
            {
                **self._compensated(bucket_flat, before, memory, ratio, momentum),
                **sent.addresses(),
            }
        )

    def collect(
        self,
        sent: SentCodes,
        bucket_flat: Tensor,
        before: Tensor,
        memory: Tensor,
        ratio: Tensor | None,
        momentum: Sequence[Tensor],
    ) -> None:
        """The first half of `send`: `memory` becomes `before` x `ratio` + the momentum, and flags are raised."""
        self._collect.start(
            {
                **self._compensated(bucket_flat, before, memory, ratio, momentum),
                **sent.addresses(),
            }
        )

    def send_collected(self, sent: SentCodes, memory: Tensor) -> None:
        """The second half: write what is sent of `memory`, which keeps the rest."""
        self._send_collected.start({"memory": memory.data_ptr(), **sent.addresses()})

    def raised(self, sent: SentCodes) -> tuple[Tensor, Tensor]:
        """(bool []: something was not finite on this rank, bool [slots]: it had a gradient), once they are written."""
        words = sent.offer[0, : len(self.group.slots) + 1].view(torch.bool)
        return words[-1], words[:-1]

    def raise_non_finite(self, sent: SentCodes, flag: Tensor) -> None:
        """Tell every owner of something that is not finite if a flag (bool []) is up."""
        # It may be one of these words.
        sent.offer[:, len(self.group.slots)].bitwise_or_(flag.clone())

    def open_momentum(self, before: Tensor, u: Tensor, ratio: Tensor | None) -> list[Tensor]:
        """`momentum` for one step: u before it, u, and what it has to be multiplied with first."""
        return [before, u, self._one if ratio is None else ratio]

    def _compensated(
        self,
        bucket_flat: Tensor,
        before: Tensor,
        memory: Tensor,
        ratio: Tensor | None,
        momentum: Sequence[Tensor],
    ) -> dict[str, int]:
        values = {
            "bucket": bucket_flat.data_ptr(),
            "before": before.data_ptr(),
            "memory": memory.data_ptr(),
            "ratio": (self._one if ratio is None else ratio).data_ptr(),
        }
        for name, tensor in zip(MOMENTUM_NAMES, momentum, strict=False):
            values[name] = tensor.data_ptr()
        return values

    def add_up(self, arrived: Tensor, sent: SentCodes, memory: Tensor) -> None:
        """Sum what has arrived with this rank's own blocks into `sent.sums`. Sets `used`, `unused` and `wrong`."""
        known = {"arrived": arrived.data_ptr(), "memory": memory.data_ptr()}
        self._add.start({**known, **sent.addresses()})

    def deliver(self, gathered: Tensor, sent: SentCodes, out: Tensor) -> None:
        """Write the mean to the bucket, or to a buffer in the group's layout. `wrong` tells of overflows too."""
        self._deliver.start(
            {
                "gathered": gathered.data_ptr(),
                "out": out.data_ptr(),
                "stride": fitting(gathered.stride(0)),
                **sent.addresses(),
            }
        )

    def joint_entry(self, memory: Tensor, sent: SentCodes, used: Tensor, unused: Tensor) -> Joint:
        """For a launch that takes back what was sent, of all buckets of a step."""
        v = sent.second_moment
        record = QuantRecord(
            memory.data_ptr(),
            sent.offer.data_ptr(),
            sent.own.data_ptr(),
            self._pieces.data_ptr(),
            used.data_ptr(),
            unused.data_ptr(),
            None if v is None else v.data_ptr(),
            self._form,
            len(self._pieces),
            self.rank,
            0.0 if self._scaling is None else self._scaling.eps,
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
