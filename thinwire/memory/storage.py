"""Storage: in what format a memory rests between its steps.

A memory works in float32; a narrow storage unpacks it when a bucket arrives and packs it again when its exchange
has ended, so that only the packed form of all buckets is held at a time. What packing loses is gone, so it rounds
stochastically: an entry much smaller than what it is added to is kept on average instead of never. The noise is a
hash of the value and its place in its slot, which needs no generator, repeats after a resume and does not know buckets.

On CUDA a whole group is packed by one kernel (`thinwire/kernels/cuda/pack.py`), with the bits of what is written here.
"""

from __future__ import annotations

import functools
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.cuda.pack import BLOCK, PackKernels
from thinwire.kernels.cuda.toolchain import Toolchain, kernels_for
from thinwire.kernels.journal import Journal
from thinwire.layout import BucketLayout, Group, Shard, Slot, SlotKind
from thinwire.memory.account import Account
from thinwire.memory.store import Binding, Buffers, FlatStore, let_go

logger = logging.getLogger(__name__)

CHUNK = 4096
"""Blocks packed at a time: what a CPU's cache holds."""
PROBED_SIZES = (300, 1, 127, 128, 129, 1000, 5, 4096, 8193, 2)
"""Slots by which kernels are compared with torch: partial blocks right before the next slot, several pieces."""
NOISE_BITS = 16
# The largest float32 that is 127 x a power of two.
LARGEST_CODED = 127 * 2.0**121
SMALLEST_EXPONENT = -126
FLOAT_BIAS = 127
FLOAT_MANTISSA = 23


class Packing(ABC):
    """float32 -> narrow codes, in blocks of 128 elements that lie next to each other in their slot.

    What they stand for is code x 2^exponent, or the code alone.
    """

    codes: ClassVar[torch.dtype]
    has_exponents: ClassVar[bool]
    """Whether every block has an exponent beside its codes."""

    @abstractmethod
    def pack(self, blocks: Tensor, places: Tensor, codes: Tensor, exponents: Tensor) -> None:
        """Write the codes [blocks, 128] and exponents (int8 [blocks]) of float32 [blocks, 128].

        What is not finite becomes 0: the step in which a memory overflowed is skipped, and nothing of that may stay.
        `places` (int32 [blocks]) say how many elements of its slot come before each block.
        """


class Bf16Packing(Packing):
    """2 bytes per element."""

    codes = torch.bfloat16
    has_exponents = False

    def pack(self, blocks: Tensor, places: Tensor, codes: Tensor, exponents: Tensor) -> None:
        bits = finite_up_to(torch.finfo(torch.bfloat16).max, blocks).view(torch.int32)
        # Adding noise below the kept bits and cutting rounds up with the probability of what is cut.
        kept = noise(bits, places).add_(bits).bitwise_and_(~((1 << NOISE_BITS) - 1))
        codes.copy_(kept.view(torch.float32))


class Int8Packing(Packing):
    """1 byte per element and one exponent per block: x = code x 2^exponent, with the smallest that saturates nothing.

    A power of two as the scale makes packing what was unpacked exact.
    """

    codes = torch.int8
    has_exponents = True

    def pack(self, blocks: Tensor, places: Tensor, codes: Tensor, exponents: Tensor) -> None:
        blocks = finite_up_to(LARGEST_CODED, blocks)
        noises = noise(blocks.view(torch.int32), places).float().mul_(2.0**-NOISE_BITS)
        # 127 = 1.984375 x 2^6: what is above that carries into the next exponent. In integers, because not every device
        # divides by 127 with one rounding.
        carry = (1 << FLOAT_MANTISSA) - int(0.984375 * (1 << FLOAT_MANTISSA)) - 1
        top = blocks.abs().amax(1).view(torch.int32)
        exponent = (top + carry >> FLOAT_MANTISSA) - (FLOAT_BIAS + 6)
        exponent.clamp_(min=SMALLEST_EXPONENT)
        blocks.mul_(power_of_two(-exponent)[:, None]).add_(noises)
        codes.copy_(blocks.floor_().clamp_(-127, 127))
        exponents.copy_(exponent)


def finite_up_to(limit: float, blocks: Tensor) -> Tensor:
    """A copy, 0 where an element is not finite."""
    return torch.nan_to_num(blocks, 0.0, 0.0, 0.0).clamp_(-limit, limit)


def power_of_two(exponents: Tensor) -> Tensor:
    """float32 2^exponent of int32 in [-126, 127], exact on every device."""
    return (exponents + FLOAT_BIAS << FLOAT_MANTISSA).view(torch.float32)


def noise(bits: Tensor, places: Tensor) -> Tensor:
    """int32 in [0, 2^16) for [blocks, 128]: a hash of each element's bits and place, in wrapping arithmetic."""
    inside = torch.arange(BLOCK, dtype=torch.int32, device=bits.device)
    mixed = (places[:, None] + inside) * 668265263
    mixed.add_(bits * -1640531527)
    mixed.bitwise_xor_(mixed >> 15).mul_(-2048144789)
    mixed.bitwise_xor_(mixed >> 13)
    return mixed.bitwise_right_shift_(7).bitwise_and_((1 << NOISE_BITS) - 1)


STORAGES: dict[str, Packing | None] = {
    "fp32": None,
    "bf16": Bf16Packing(),
    "int8": Int8Packing(),
}
"""None = the group's own dtype (float32, float64 for float64 gradients), nothing packed."""


def make_store(storage: str) -> FlatStore:
    packing = STORAGES[storage]
    return FlatStore() if packing is None else PackedStore(packing)


class StorageBlocks:
    """How slots of these sizes are cut into blocks; the last one of a slot is filled up with zeros."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.counts = [-(-size // BLOCK) for size in sizes]
        self.total = sum(self.counts)
        self._splits = [part for size in sizes for part in (size, -size % BLOCK)]
        self._device = device
        counts = torch.tensor(self.counts, dtype=torch.int64)
        self._counts = counts.to(device)
        self._firsts = (counts.cumsum(0) - counts).int().to(device)

    def cut(self, blocks: Tensor) -> list[Tensor]:
        """The slots in [blocks, 128], each as a 1-D piece without what fills it up."""
        return list(blocks.view(-1).split_with_sizes(self._splits)[::2])

    def fill(self, spans: Sequence[Tensor]) -> Tensor:
        """float32 [blocks, 128] of the slots' values or codes."""
        blocks = torch.zeros(self.total, BLOCK, device=self._device)
        torch._foreach_copy_(self.cut(blocks), list(spans))
        return blocks

    def places(self) -> Tensor:
        """int32 [blocks]: elements of its slot that come before each block."""
        numbers = torch.arange(self.total, dtype=torch.int32, device=self._device)
        before = self._firsts.repeat_interleave(self._counts, output_size=self.total)
        return (numbers - before) * BLOCK


def pack_spans(
    packing: Packing,
    blocks: StorageBlocks,
    spans: Sequence[Tensor],
    codes: Sequence[Tensor],
    exponents: Tensor,
    at_a_time: int = CHUNK,
) -> None:
    """Pack the slots' values to their codes and exponents, so many blocks at a time; no operation per slot but the copies."""
    if not blocks.total:
        return
    values, places = blocks.fill(spans), blocks.places()
    coded = torch.empty(values.shape, dtype=packing.codes, device=values.device)
    for at in range(0, blocks.total, at_a_time):
        part = slice(at, at + at_a_time)
        packing.pack(values[part], places[part], coded[part], exponents[part])
    torch._foreach_copy_(list(codes), blocks.cut(coded))


def unpack_spans(
    packing: Packing,
    blocks: StorageBlocks,
    codes: Sequence[Tensor],
    exponents: Tensor,
    spans: Sequence[Tensor],
) -> None:
    """Write what the slots' codes and exponents stand for."""
    if not blocks.total:
        return
    if not packing.has_exponents:
        torch._foreach_copy_(list(spans), list(codes))
        return
    values = blocks.fill(codes).mul_(power_of_two(exponents.int())[:, None])
    torch._foreach_copy_(list(spans), blocks.cut(values))


class Packed(NamedTuple):
    """A group's values in packed form. Codes lie where values lie in the group's buffer, the exponents of all slots one
    behind the other."""

    codes: Tensor
    exponents: Tensor

    def nbytes(self) -> int:
        return self.codes.nbytes + self.exponents.nbytes


class PackedBinding(Binding):
    """A group's values in packed form; `flat` is empty while they rest."""

    def __init__(self, group: Group, packing: Packing, journal: Journal | None = None) -> None:
        super().__init__(group, torch.zeros(0, dtype=group.dtype, device=group.device))
        self.packing = packing
        self.journal = journal
        self._blocks = StorageBlocks([slot.numel for slot in group.slots], group.device)
        counts = [count if packing.has_exponents else 0 for count in self._blocks.counts]
        ends = [0, *itertools.accumulate(counts)]
        self._exponents = {
            slot.name: slice(*pair)
            for slot, pair in zip(group.slots, itertools.pairwise(ends), strict=True)
        }
        self.packed = self._room(ends[-1])
        self._spare_packed = None if journal is None else self._room(ends[-1])
        toolchain = kernels_for(group.device) if group.dtype == torch.float32 else None
        trusted = toolchain is not None and kernels_agree(packing, toolchain, group.device)
        self.kernels = PackKernels(group, packing.codes) if trusted else None
        """None where torch packs."""

    def _room(self, exponents: int) -> Packed:
        device = self.group.device
        codes = torch.zeros(self.group.numel, dtype=self.packing.codes, device=device)
        return Packed(codes, torch.zeros(exponents, dtype=torch.int8, device=device))

    def begin(self, scale: Tensor | None) -> Buffers:
        """Unpacked values are a buffer of the step's own, which is changed in place."""
        flat = self.lift()
        if self.journal is not None:
            assert self._spare_packed is not None
            self.packed, self._spare_packed = self._spare_packed, self.packed
            for now, before in zip(self.packed, self._spare_packed, strict=True):
                self.journal.note(now, before)
        return Buffers(flat, flat, self._change_units(scale))

    def lift(self, flag: Tensor | None = None) -> Tensor:
        group = self.group
        if self.kernels is not None:
            flat = torch.empty(group.numel, device=group.device)
            self.kernels.unpack(*self.packed, flat, flag)
            return flat
        flat = torch.zeros(group.numel, dtype=group.dtype, device=group.device)
        codes, exponents = self.packed
        unpack_spans(self.packing, self._blocks, group.spans(codes), exponents, group.spans(flat))
        return flat

    def rest(self, flat: Tensor, flag: Tensor | None = None) -> None:
        group = self.group
        let_go(flat)
        codes, exponents = self.packed
        if self.kernels is not None:
            self.kernels.pack(flat, codes, exponents, flag)
            return
        pack_spans(self.packing, self._blocks, group.spans(flat), group.spans(codes), exponents)

    def read(self, slot: Slot) -> Tensor:
        span = torch.zeros(slot.numel, dtype=self.group.dtype, device=self.group.device)
        unpack_spans(self.packing, *self._of(slot), [span])
        values = slot.at(0).view(span)
        return values / self.units if self.units is not None else values

    def put(self, slot: Slot, values: Tensor) -> None:
        span = torch.zeros(slot.numel, dtype=self.group.dtype, device=self.group.device)
        slot.at(0).view(span).copy_(values if self.units is None else values * self.units)
        blocks, codes, exponents = self._of(slot)
        pack_spans(self.packing, blocks, [span], codes, exponents)

    def _of(self, slot: Slot) -> tuple[StorageBlocks, list[Tensor], Tensor]:
        """(how a slot is cut, its codes, its exponents)."""
        codes, exponents = self.packed
        blocks = StorageBlocks([slot.numel], self.group.device)
        return blocks, [slot.span(codes)], exponents[self._exponents[slot.name]]

    def nbytes(self) -> int:
        return self.packed.nbytes() * (1 if self._spare_packed is None else 2)


@functools.cache
def kernels_agree(packing: Packing, toolchain: Toolchain, device: torch.device) -> bool:
    """Whether the device's kernels, as the compiler of this machine made them, give the bits of torch; says so once if not.

    One compiler was seen to write four codes past the end of a slot. A memory with wrong codes would show nowhere, so that
    looking, once per process, is worth its milliseconds.
    """
    slots = [
        Slot(str(index), (size,), (1,), 0, SlotKind.OTHER, Shard((size,)))
        for index, size in enumerate(PROBED_SIZES)
    ]
    group = Group.of(BucketLayout((), 0, torch.float32, device), slots, torch.float32)
    flat = torch.randn(group.numel, generator=torch.Generator().manual_seed(0)).to(device)
    blocks = StorageBlocks(PROBED_SIZES, device)
    results = []
    for kernels in (PackKernels(group, packing.codes), None):
        codes = torch.zeros(group.numel, dtype=packing.codes, device=device)
        exponents = torch.zeros(blocks.total, dtype=torch.int8, device=device)
        values = torch.zeros_like(flat)
        if kernels is not None:
            kernels.pack(flat, codes, exponents, None)
            kernels.unpack(codes, exponents, values, None)
        else:
            pack_spans(packing, blocks, group.spans(flat), group.spans(codes), exponents)
            unpack_spans(packing, blocks, group.spans(codes), exponents, group.spans(values))
        results.append((codes, exponents, values))
    agree = all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    if not agree:
        logger.warning(
            "the kernels for narrow memories give other bits than torch on %s; torch packs them, which is slower",
            device,
        )
    return agree


class PackedStore(FlatStore):
    def __init__(self, packing: Packing) -> None:
        super().__init__()
        self.packing = packing

    def make_binding(self, group: Group) -> Binding:
        return PackedBinding(group, self.packing, self.journal)

    def resting_bytes(self, numel: int, dtype: torch.dtype) -> int:
        blocks = -(-numel // BLOCK) if self.packing.has_exponents else 0
        return numel * self.packing.codes.itemsize + blocks


class PackedAccount(Account):
    """An account whose memory is packed again as soon as its exchange has ended."""

    def __init__(self, c: Tensor, binding: Binding) -> None:
        super().__init__(c)
        self._binding = binding
        self._resting = False

    def rest(self) -> None:
        self._rest(None)

    def _rest(self, flag: Tensor | None) -> None:
        self._binding.rest(self.c, flag)
        self.c = self.c[:0].clone()
        self._resting = True

    def settle(self, bad: Tensor) -> None:
        # With nothing to change, packing once more would only cost time.
        flag = bad if self._resting and self._rounding is None else None
        if flag is not None and bad.device.type == "cpu" and not bool(bad):
            self._verdict = bad
            return
        if self._resting:
            self.c = self._binding.lift(flag)
        super().settle(bad)
        self._rest(flag)
