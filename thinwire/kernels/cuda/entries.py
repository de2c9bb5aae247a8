"""EntryKernels: what is done with whole buckets before and after an exchange that is torch code on entries (entries.cu).

References: `PartsRoute.begin` in thinwire/compress/sparse.py, `deliver_mean` in thinwire/exchange/common.py, `BlockSample.take` in
thinwire/exchange/exclusive.py. The bits are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.cuda.clear import Cleared, cut_cleared
from thinwire.kernels.cuda.launch import PreparedLaunch, Varying
from thinwire.kernels.cuda.prepared import BEFORE, BUCKET, MEMORY, RATIO
from thinwire.kernels.cuda.source import FLOAT_CODES, Defines
from thinwire.kernels.cuda.structs import declare, i32, i64, layout_of, make_room, make_table
from thinwire.kernels.cuda.toolchain import Toolchain, toolchain_of
from thinwire.layout import Group
from thinwire.wire.codec import Flags

PIECE = 8192
"""Elements that one block has."""
PIECE_THREADS = 256
EntryPiece = declare("EntryPiece", (i64, "bucket memory"), (i32, "count slot"))
TakenBlocks = declare("TakenBlocks", (i32, "first count shift place"))
FLAGS = Varying("flags")


def entries_defines(gradients: torch.dtype) -> Defines:
    layouts = map(layout_of, (EntryPiece, TakenBlocks, Cleared))
    return (
        ("GRADIENT_CODE", FLOAT_CODES[gradients]),
        ("PIECE_THREADS", PIECE_THREADS),
        *layouts,
    )


class MemoryKernel:
    """Gradient and memory of one group become c in one pass, and the pass says what it saw."""

    def __init__(self, group: Group, gradient_dtype: torch.dtype) -> None:
        self.group = group
        self._one = torch.ones(1, device=group.device)
        defines = entries_defines(gradient_dtype)
        kernel = toolchain_of(group.device).compile("entries.cu", "open_memory", defines)
        pieces, slots = cut_pieces(group).to(group.device), len(group.slots)
        args = [BUCKET, BEFORE, MEMORY, pieces, RATIO, FLAGS, slots]
        self._open = PreparedLaunch(kernel, len(pieces), PIECE_THREADS, args)

    def open(
        self, bucket_flat: Tensor, before: Tensor, memory: Tensor, ratio: Tensor | None
    ) -> Flags:
        """`memory` becomes `before` x `ratio` + the gradient; what is not finite becomes 0 and is told."""
        slots = len(self.group.slots)
        flags = torch.zeros(slots + 1, dtype=torch.bool, device=self.group.device)
        self._open.start(
            {
                "bucket": bucket_flat.data_ptr(),
                "before": before.data_ptr(),
                "memory": memory.data_ptr(),
                "ratio": (self._one if ratio is None else ratio).data_ptr(),
                "flags": flags.data_ptr(),
            }
        )
        return Flags(non_finite=flags[slots], had_gradient=flags[:slots])


class DeliveryKernels:
    """The mean of a few entries is all there is of a group's update: into a float32 bucket, without a dense copy of it."""

    def __init__(self, group: Group, world: int) -> None:
        device = group.device
        toolchain, defines = toolchain_of(device), entries_defines(torch.float32)
        self._device, self._numel = device, group.numel
        self._wrong = torch.zeros((), dtype=torch.bool, device=device)
        cleared = cut_cleared(group).to(device)
        begins = torch.tensor([slot.offset for slot in group.slots], device=device)
        sources = torch.tensor([slot.offset for slot in group.sources], device=device)
        share = torch.full((1,), 1 / world, device=device)
        self._tables = [begins, sources - begins, self._wrong, share]
        self._slots = len(group.slots)
        clear = toolchain.compile("entries.cu", "clear_bucket", defines)
        self._clear = PreparedLaunch(
            clear, len(cleared), PIECE_THREADS, [BUCKET, cleared, self._wrong]
        )
        self._write = toolchain.compile("entries.cu", "write_entries", defines)

    def write(self, bucket_flat: Tensor, positions: Tensor, sums: Tensor) -> Tensor:
        """Write the mean of sums at flat positions (int64, each once; outside the group is nowhere), zeros elsewhere. Returns bool []:
        one was not finite, until the next call."""
        self._clear.start({"bucket": bucket_flat.data_ptr()})
        count = positions.numel()
        if count:
            read = [positions.contiguous(), sums.contiguous(), bucket_flat]
            args = [*read, *self._tables, count, self._slots, self._numel]
            self._write(-(-count // PIECE_THREADS), PIECE_THREADS, args)
        return self._wrong


class BlockTaker:
    """Takes blocks out of a flat float32 tensor."""

    def __init__(self, toolchain: Toolchain, starts: Tensor, ends: Tensor, sizes: Tensor) -> None:
        """Where each block begins, where its slot ends, and its size; blocks of one size side by side. All on the CPU or the device."""
        device = starts.device
        self.numel = int(sizes.sum())
        self._pieces = cut_blocks(sizes.cpu()).to(device)
        self._starts, self._ends = starts, ends
        defines = entries_defines(torch.float32)
        self._kernel = toolchain.compile("entries.cu", "take_blocks", defines)

    def take(self, flat: Tensor) -> Tensor:
        """The elements, block after block; zeros beyond the end of a slot."""
        taken = torch.empty(self.numel, device=flat.device)
        args = [flat, taken, self._pieces, self._starts, self._ends]
        self._kernel(len(self._pieces), PIECE_THREADS, args)
        return taken


def cut_pieces(group: Group) -> Tensor:
    """struct EntryPiece of every part of every slot."""
    tables = []
    for number, (source, slot) in enumerate(zip(group.sources, group.slots, strict=True)):
        starts = torch.arange(0, slot.numel, PIECE)
        counts = (slot.numel - starts).clamp(max=PIECE)
        places = {"bucket": source.offset + starts, "memory": slot.offset + starts}
        tables.append(make_table(EntryPiece, **places, count=counts, slot=number))
    return torch.cat(tables)


def cut_blocks(sizes: Tensor) -> Tensor:
    """struct TakenBlocks of all blocks."""
    tables, block, place = [make_room(TakenBlocks, 0, torch.device("cpu"))], 0, 0
    for size, count in zip(*sizes.unique_consecutive(return_counts=True), strict=True):
        shift, number = int(size).bit_length() - 1, int(count)
        assert int(size) == 1 << shift
        each = PIECE >> shift
        firsts = torch.arange(0, number, each)
        tables.append(
            make_table(
                TakenBlocks,
                first=block + firsts,
                count=(number - firsts).clamp(max=each),
                shift=shift,
                place=place + (firsts << shift),
            )
        )
        block, place = block + number, place + (number << shift)
    return torch.cat(tables)
