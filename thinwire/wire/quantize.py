"""Block quantisers: a matrix whose rows are blocks -> small codes and one scale per block -> what they stand for.

Scales are bfloat16, cut towards zero. So a decoded number is a whole multiple of few bits times a power of two, and what
rounding to nearest leaves of a float32 is a float32 without error (`thinwire/wire/blocks.py` has the argument). Dividing by
multiplication with the inverse keeps that: it can only miss the nearest code right at a tie, where both differences are exact.

Draws for stochastic rounding are given, so that nothing here depends on a generator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from thinwire.wire.blocks import LARGEST, SCALE_BYTES, SMALLEST_SCALE, truncate_scale

DRAW_BITS = 16
LLOYD_ROUNDS = 3
"""How often three levels are fitted to a block. One more gains less than 2 % of the error (`benchmarks/ternary.py`)."""
FIRST_CUT = 0.75
"""Of the mean magnitude: what is below it counts as zero in the first round."""


Limit = Any
"""The most that a code may stand for: a number, a tensor with one, or None. `clamp` takes all of them, but never says so of one argument."""


class Coded(NamedTuple):
    """Blocks as they travel."""

    scales: Tensor
    """uint8 [..., bytes]: the block's scale; no bytes for codes that have none."""
    codes: Tensor
    """uint8 [..., bytes]: the block's elements, the first in the lowest bits."""


class BlockQuantizer(ABC):
    """One way to write blocks down. Everything works on the last dimension; those before it count blocks."""

    bits: ClassVar[int]
    """Per element, without the scale."""
    scale_bytes: ClassVar[int] = SCALE_BYTES
    has_kernels: ClassVar[bool] = True
    """Whether the CUDA kernels write it too."""

    def encode(
        self,
        blocks: Tensor,
        lengths: Tensor,
        draws: Tensor | None = None,
        divisor: Tensor | None = None,
        limit: Limit = None,
    ) -> Coded:
        """Codes of finite blocks [..., size], of which the first `lengths` (int [...]) elements count; the others are zero.

        With `draws` (float32 in [0, 1), like the blocks) it rounds up with the probability of what is cut, else to nearest.
        With a `divisor` (positive, like the blocks) blocks / divisor is what is written. No code stands for more than `limit`.
        """
        values = blocks if divisor is None else blocks / divisor
        if values.dtype != torch.float32:
            values = values.clamp(-LARGEST, LARGEST).float()
        return self._encode_within(limit, values, lengths, draws)

    def decode(self, coded: Coded, divisor: Tensor | None = None) -> Tensor:
        """float32 [..., size]: what the codes stand for."""
        values = self._decode(coded)
        return values if divisor is None else values * divisor

    def block_bytes(self, size: int) -> int:
        """Of the codes of a block."""
        return size * self.bits // 8

    def bits_per_element(self, size: int) -> float:
        """The scale included."""
        return self.bits + 8 * self.scale_bytes / size

    def _encode_within(
        self, limit: Limit, values: Tensor, lengths: Tensor, draws: Tensor | None
    ) -> Coded:
        """Elements are cut before they are coded, so that those within the limit get the finer steps."""
        if limit is not None:
            values = values.clamp(-limit, limit)
        return self._encode(values, lengths, draws)

    @abstractmethod
    def _encode(self, values: Tensor, lengths: Tensor, draws: Tensor | None) -> Coded: ...

    @abstractmethod
    def _decode(self, coded: Coded) -> Tensor: ...


ALIGNMENT = 16
"""Bytes: every section of a message begins at a multiple."""


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class MessageLayout(NamedTuple):
    """The blocks of one owner as they travel: flags (a byte each), scales, codes."""

    flags: int
    blocks: int
    scale_bytes: int
    block_bytes: int

    @classmethod
    def of(cls, quantizer: BlockQuantizer, flags: int, blocks: int, size: int) -> MessageLayout:
        return cls(flags, blocks, quantizer.scale_bytes, quantizer.block_bytes(size))

    @property
    def scales_at(self) -> int:
        return aligned(self.flags)

    @property
    def codes_at(self) -> int:
        return self.scales_at + aligned(self.blocks * self.scale_bytes)

    @property
    def nbytes(self) -> int:
        return self.codes_at + aligned(self.blocks * self.block_bytes)

    def write(self, flags: Tensor, coded: Coded) -> Tensor:
        """uint8 [rows, nbytes] of bool [flags] and the codes of [rows, blocks]."""
        rows = coded.codes.shape[0]
        message = torch.zeros(rows, self.nbytes, dtype=torch.uint8, device=flags.device)
        message[:, : self.flags] = flags
        at, nbytes = self.scales_at, self.blocks * self.scale_bytes
        message[:, at : at + nbytes] = coded.scales.reshape(rows, -1)
        at, nbytes = self.codes_at, self.blocks * self.block_bytes
        message[:, at : at + nbytes] = coded.codes.reshape(rows, -1)
        return message

    def read(self, message: Tensor) -> tuple[Tensor, Coded]:
        """(bool [flags]: up in some row, codes of [rows, blocks])."""
        rows = message.shape[0]
        at, nbytes = self.scales_at, self.blocks * self.scale_bytes
        scales = message[:, at : at + nbytes].reshape(rows, self.blocks, self.scale_bytes)
        at, nbytes = self.codes_at, self.blocks * self.block_bytes
        codes = message[:, at : at + nbytes].reshape(rows, self.blocks, self.block_bytes)
        return (message[:, : self.flags] != 0).any(0), Coded(scales, codes)


@dataclass(frozen=True)
class IntegerBlocks(BlockQuantizer):
    """Whole numbers from -peak to peak; the scale puts the block's largest magnitude at the peak."""

    bits: int  # type: ignore[misc]

    @property
    def peak(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def _encode(self, values: Tensor, lengths: Tensor, draws: Tensor | None) -> Coded:
        # Not a quotient: devices divide by a number in different ways.
        scales = truncate_scale(largest(values).mul_(1 / self.peak).clamp_(min=SMALLEST_SCALE))
        multiples = values * (1.0 / scales)[..., None]
        rounded = round_to_whole(multiples, draws).clamp_(-self.peak, self.peak)
        return Coded(scale_bytes(scales), pack_fields(rounded.to(torch.int8), self.bits))

    def _decode(self, coded: Coded) -> Tensor:
        return unpack_fields(coded.codes, self.bits).float() * read_scales(coded.scales)[..., None]


@dataclass(frozen=True)
class TernaryBlocks(BlockQuantizer):
    """-1, 0 and 1 times the scale that fits the block best in the sense of least squares.

    Lloyd's rounds: the scale is the mean magnitude of what is not zero, and zero is what is nearer to it than to the scale.
    """

    bits = 2

    def _encode(self, values: Tensor, lengths: Tensor, draws: Tensor | None) -> Coded:
        sizes = values.abs()
        wide = sizes.double()
        cut = FIRST_CUT * sum_pairwise(wide) / lengths.clamp(min=1)
        for _ in range(LLOYD_ROUNDS):
            above = wide > cut[..., None]
            mean = sum_pairwise(torch.where(above, wide, 0.0)) / above.sum(-1).clamp(min=1)
            cut = mean / 2
        scales = truncate_scale(usable_scale(mean))
        if draws is None:
            # Twice a float is exact, unlike a quotient.
            codes = (2 * sizes > scales[..., None]) & (scales > 0)[..., None]
            codes = codes.to(torch.int8) * values.sign().to(torch.int8)
        else:
            inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
            codes = round_to_whole(values * inverse[..., None], draws).clamp_(-1, 1).to(torch.int8)
        return Coded(scale_bytes(scales), pack_fields(codes, self.bits))

    def _decode(self, coded: Coded) -> Tensor:
        return unpack_fields(coded.codes, self.bits).float() * read_scales(coded.scales)[..., None]


@dataclass(frozen=True)
class SignBlocks(BlockQuantizer):
    """Plus or minus the mean magnitude of the block. A zero becomes a plus: there is no third code."""

    bits = 1

    def _encode(self, values: Tensor, lengths: Tensor, draws: Tensor | None) -> Coded:
        return self._encode_within(None, values, lengths, draws)

    def _encode_within(
        self, limit: Limit, values: Tensor, lengths: Tensor, draws: Tensor | None
    ) -> Coded:
        """What is sent is cut: an element above the limit counts in the mean for all it is."""
        mean = usable_scale(sum_pairwise(values.abs().double()) / lengths.clamp(min=1))
        scales = truncate_scale(mean if limit is None else mean.clamp(max=limit))
        if draws is None:
            minus = values < 0
        else:
            inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
            minus = values * inverse[..., None] < 2 * draws - 1
        return Coded(scale_bytes(scales), pack_fields(minus.to(torch.int8), 1))

    def _decode(self, coded: Coded) -> Tensor:
        signs = 1.0 - 2.0 * unpack_bits(coded.codes).float()
        return signs * read_scales(coded.scales)[..., None]


@dataclass(frozen=True)
class Bf16Blocks(BlockQuantizer):
    """bfloat16 numbers; no scale."""

    bits = 16
    scale_bytes = 0

    def _encode(self, values: Tensor, lengths: Tensor, draws: Tensor | None) -> Coded:
        limit = torch.finfo(torch.bfloat16).max
        values = values.clamp(-limit, limit)
        if draws is not None:
            below = (draws * (1 << DRAW_BITS)).int()
            values = truncate_scale((values.view(torch.int32) + below).view(torch.float32))
        codes = values.bfloat16().view(torch.uint8)
        return Coded(codes[..., :0], codes)

    def _decode(self, coded: Coded) -> Tensor:
        return coded.codes.contiguous().view(torch.bfloat16).float()


@dataclass(frozen=True)
class Fp8Blocks(BlockQuantizer):
    """8-bit floating-point numbers (e4m3); the scale puts the block's largest magnitude at their largest, 448."""

    bits = 8
    has_kernels = False

    def _encode(self, values: Tensor, lengths: Tensor, draws: Tensor | None) -> Coded:
        limit = torch.finfo(torch.float8_e4m3fn).max
        scales = truncate_scale(largest(values).mul_(1 / limit).clamp_(min=SMALLEST_SCALE))
        multiples = values * (1.0 / scales)[..., None]
        # Three bits behind the leading one; below 2^-6 the last place is 2^-9.
        place = (multiples.view(torch.int32) & 0x7F800000) - (3 << 23)
        place = place.clamp_(min=(127 - 9) << 23).view(torch.float32)
        rounded = round_to_whole(multiples / place, draws).mul_(place).clamp_(-limit, limit)
        return Coded(scale_bytes(scales), rounded.to(torch.float8_e4m3fn).view(torch.uint8))

    def _decode(self, coded: Coded) -> Tensor:
        values = coded.codes.contiguous().view(torch.float8_e4m3fn).float()
        return values * read_scales(coded.scales)[..., None]


QUANTIZERS: dict[int | str, BlockQuantizer] = {
    16: Bf16Blocks(),
    8: IntegerBlocks(8),
    4: IntegerBlocks(4),
    2: TernaryBlocks(),
    1: SignBlocks(),
}
"""By the `bits` of `tw.Quantized`."""
if hasattr(torch, "float8_e4m3fn"):
    QUANTIZERS["fp8"] = Fp8Blocks()


def largest(values: Tensor) -> Tensor:
    """float32 [...]: the largest magnitude of each block."""
    low, high = values.aminmax(dim=-1)
    return torch.maximum(high, -low)


def round_to_whole(multiples: Tensor, draws: Tensor | None) -> Tensor:
    """In place where it may."""
    return multiples.round_() if draws is None else multiples.add_(draws).floor_()


def sum_pairwise(values: Tensor) -> Tensor:
    """[...]: neighbours are added, then neighbouring sums: an order that knows nothing of other blocks or of the device.

    The size must be a power of two.
    """
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def usable_scale(mean: Tensor) -> Tensor:
    """float32; 0 where it would be subnormal, which some devices flush."""
    scales = mean.clamp(max=LARGEST).float()
    return torch.where(scales < SMALLEST_SCALE, 0.0, scales)


def scale_bytes(scales: Tensor) -> Tensor:
    """uint8 [..., 2] of float32 [...] that are bfloat16 numbers."""
    return scales.bfloat16()[..., None].view(torch.uint8)


def read_scales(raw: Tensor) -> Tensor:
    """float32 [...] of uint8 [..., 2]."""
    return raw.contiguous().view(torch.bfloat16)[..., 0].float()


def pack_fields(codes: Tensor, bits: int) -> Tensor:
    """uint8 of int8 codes in `bits` bits of two's complement each, the first in the lowest bits."""
    fields = codes.view(torch.uint8)
    if bits == 8:
        return fields
    fields = fields & ((1 << bits) - 1)
    each = 8 // bits
    packed = fields[..., 0::each].clone()
    for index in range(1, each):
        packed |= fields[..., index::each] << (index * bits)
    return packed


def unpack_fields(packed: Tensor, bits: int) -> Tensor:
    """int8, with the sign of the highest bit of each field."""
    if bits == 8:
        return packed.view(torch.int8)
    each = 8 // bits
    shifted = [packed << (8 - bits * (index + 1)) for index in range(each)]
    return torch.stack(shifted, -1).flatten(-2).view(torch.int8) >> (8 - bits)


def unpack_bits(packed: Tensor) -> Tensor:
    """uint8 zeros and ones."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> places) & 1).flatten(-2)


def draw(seeds: Tensor, places: Tensor, size: int) -> Tensor:
    """float32 [..., size] in [0, 1): a hash of each block's seed (int32 [...]) and each element's place in its slot.

    `places` (int32 [...]) are those of the first elements. In wrapping int32 arithmetic, the same on every device.
    """
    inside = torch.arange(size, dtype=torch.int32, device=seeds.device)
    mixed = (places[..., None] + inside) * 668265263 + seeds[..., None]
    mixed = scramble(mixed)
    return (
        (mixed.bitwise_right_shift_(7).bitwise_and_((1 << DRAW_BITS) - 1))
        .float()
        .mul_(2.0**-DRAW_BITS)
    )


def scramble(mixed: Tensor) -> Tensor:
    """int32, in place: every bit of a number decides about many of the result."""
    mixed ^= mixed >> 15
    mixed *= -2048144789
    mixed ^= mixed >> 13
    mixed *= -1028477387
    mixed ^= mixed >> 16
    return mixed
