"""Storage: in what format a memory rests between its steps.

A memory works in float32; a narrow storage unpacks it when a bucket arrives and packs it again when its exchange
has ended, so that only the packed form of all buckets is held at a time. What packing loses is gone, so it rounds
stochastically: an entry much smaller than what it is added to is kept on average instead of never. The noise is a
hash of the value and its place, which needs no generator and repeats after a resume.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from thinwire.layout import Slot
from thinwire.memory.account import Account
from thinwire.memory.store import Binding, FlatStore
from thinwire.plan.groups import Group

BLOCK = 128
NOISE_BITS = 16
# The largest float32 that is 127 x a power of two.
LARGEST_CODED = 127 * 2.0**121


class Packing(ABC):
    """float32 <-> a few narrow tensors, for one slot at a time."""

    @abstractmethod
    def pack(self, values: Tensor) -> tuple[Tensor, ...]: ...

    @abstractmethod
    def unpack(self, packed: tuple[Tensor, ...], numel: int) -> Tensor: ...


class Bf16Packing(Packing):
    """2 bytes per element."""

    def pack(self, values: Tensor) -> tuple[Tensor, ...]:
        limit = torch.finfo(torch.bfloat16).max
        bits = values.float().clamp(-limit, limit).view(torch.int32)
        # Adding noise below the kept bits and cutting rounds up with the probability of what is cut.
        kept = (bits + noise(bits)) & ~((1 << NOISE_BITS) - 1)
        return (kept.view(torch.float32).to(torch.bfloat16),)

    def unpack(self, packed: tuple[Tensor, ...], numel: int) -> Tensor:
        return packed[0].float()


class Int8Packing(Packing):
    """1 byte per element and one exponent per 128: x = code x 2^exponent.

    A power of two as the scale makes packing what was unpacked exact.
    """

    def pack(self, values: Tensor) -> tuple[Tensor, ...]:
        count = values.numel()
        blocks = torch.zeros(-(-count // BLOCK) * BLOCK, dtype=torch.float32, device=values.device)
        blocks[:count] = values.float().clamp(-LARGEST_CODED, LARGEST_CODED)
        noises = noise(blocks.view(torch.int32)).float() * 2.0**-NOISE_BITS
        blocks = blocks.view(-1, BLOCK)
        fraction, exponent = torch.frexp(blocks.abs().amax(1) / 127)
        exponent = (exponent - (fraction == 0.5).int()).clamp(-126, 127)
        scaled = torch.ldexp(blocks, -exponent[:, None]) + noises.view(-1, BLOCK)
        codes = scaled.floor().clamp(-127, 127).to(torch.int8)
        return codes.view(-1)[:count].clone(), exponent.to(torch.int8)

    def unpack(self, packed: tuple[Tensor, ...], numel: int) -> Tensor:
        codes, exponents = packed
        scales = exponents.int().repeat_interleave(BLOCK, output_size=BLOCK * exponents.numel())
        return torch.ldexp(codes.float(), scales[:numel])


def noise(bits: Tensor) -> Tensor:
    """int32 in [0, 2^16): a hash of each element's bits and place, in wrapping arithmetic."""
    place = torch.arange(bits.numel(), dtype=torch.int32, device=bits.device)
    mixed = bits * -1640531527 + place * 668265263
    mixed = (mixed ^ (mixed >> 15)) * -2048144789
    return ((mixed ^ (mixed >> 13)) >> 7) & ((1 << NOISE_BITS) - 1)


STORAGES: dict[str, Packing | None] = {
    "fp32": None,
    "bf16": Bf16Packing(),
    "int8": Int8Packing(),
}
"""None = the group's own dtype (float32, float64 for float64 gradients), nothing packed."""


def make_store(storage: str) -> FlatStore:
    packing = STORAGES[storage]
    return FlatStore() if packing is None else PackedStore(packing)


class PackedBinding(Binding):
    """A group's values in packed form; `flat` is empty while they rest."""

    def __init__(self, group: Group, packing: Packing) -> None:
        super().__init__(group, torch.zeros(0, dtype=group.dtype, device=group.device))
        self.packing = packing
        self._packed: dict[str, tuple[Tensor, ...]] = {
            slot.name: packing.pack(torch.zeros(slot.numel, device=group.device))
            for slot in group.slots
        }

    def open(self, scale: Tensor | None) -> Tensor:
        flat = torch.zeros(self.group.numel, dtype=self.group.dtype, device=self.group.device)
        for slot in self.group.slots:
            slot.span(flat).copy_(self.packing.unpack(self._packed[slot.name], slot.numel))
        if scale is not None:
            flat.mul_(scale if self.units is None else scale / self.units)
            self.units = scale.clone()
        return flat

    def rest(self, flat: Tensor) -> None:
        for slot in self.group.slots:
            self._packed[slot.name] = self.packing.pack(slot.span(flat))

    def read(self, slot: Slot) -> Tensor:
        span = self.packing.unpack(self._packed[slot.name], slot.numel).to(self.group.dtype)
        values = slot.at(0).view(span)
        return values / self.units if self.units is not None else values

    def put(self, slot: Slot, values: Tensor) -> None:
        span = torch.zeros(slot.numel, dtype=self.group.dtype, device=self.group.device)
        slot.at(0).view(span).copy_(values if self.units is None else values * self.units)
        self._packed[slot.name] = self.packing.pack(span)

    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self._packed.values() for part in parts)


class PackedStore(FlatStore):
    def __init__(self, packing: Packing) -> None:
        super().__init__()
        self.packing = packing

    def make_binding(self, group: Group) -> Binding:
        return PackedBinding(group, self.packing)


class PackedAccount(Account):
    """An account whose memory is packed again as soon as its exchange has ended."""

    def __init__(self, c: Tensor, binding: Binding) -> None:
        super().__init__(c)
        self._binding = binding
        self._resting = False

    def rest(self) -> None:
        self._binding.rest(self.c)
        self.c = self.c[:0].clone()
        self._resting = True

    def settle(self, bad: Tensor) -> None:
        # With nothing to change, packing once more would only cost time.
        untouched = self._resting and self._rounding is None
        if untouched and bad.device.type == "cpu" and not bool(bad):
            self._verdict = bad
            return
        if self._resting:
            self.c = self._binding.open(self._binding.units)
        super().settle(bad)
        self.rest()
