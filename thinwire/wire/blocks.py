"""Blockwise value codes: small whole numbers times one bfloat16 scale per block of a slot.

A block never crosses a slot, so that the same gradient gives the same bits in whatever bucket its slot lies.

Why the rounding error is exact: a scale is t x 2**s with t < 256, so a decoded value v = m x t x 2**s is a multiple of
2**s, and |c| < 2**15 x 2**s makes the last place of any float32 c in the block smaller than 2**s. So c - v is a
multiple of c's last place and, after rounding to nearest, no larger than |c|: a float32 holds it without error.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.layout import RowTable
from thinwire.wire.bits import collapse_bits, expand_bits
from thinwire.wire.floats import ValueCode

SCALE_BYTES = 2
LARGEST = torch.finfo(torch.float32).max
SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny
"""Below it a scale would be subnormal, which some devices flush; such blocks are sent as zeros."""


@dataclass(frozen=True)
class Blocks:
    """Where the entries of a table lie when every slot is padded to whole blocks."""

    count: int
    size: int
    places: Tensor
    """int64 [entries]: place in the padded [count x size] matrix"""

    def matrix(self, values: Tensor) -> Tensor:
        """float32 [count, size]: finite values by block, zeros where a block is not full."""
        finite = values.clamp(-LARGEST, LARGEST).float().nan_to_num(nan=0.0)
        padded = torch.zeros(self.count * self.size, device=values.device)
        padded[self.places] = finite
        return padded.view(self.count, self.size)

    def entries(self, matrix: Tensor) -> Tensor:
        """Back from the padded matrix to one number per entry."""
        return matrix.reshape(-1)[self.places]

    def spread(self, per_block: Tensor) -> Tensor:
        """Each entry's share of a quantity kept per block."""
        return per_block[self.places // self.size]


_known: WeakKeyDictionary[RowTable, dict[tuple[int, torch.device], Blocks]] = WeakKeyDictionary()


def count_blocks(table: RowTable, size: int) -> int:
    return sum(-(-rows.entries // size) for rows in table.rows)


def cut_blocks(table: RowTable, size: int, device: torch.device) -> Blocks:
    """The blocks of a table, remembered as long as the table lives."""
    known = _known.setdefault(table, {})
    if (size, device) not in known:
        places, block = [torch.zeros(0, dtype=torch.int64)], 0
        for rows in table.rows:
            places.append(block * size + torch.arange(rows.entries))
            block += -(-rows.entries // size)
        known[size, device] = Blocks(block, size, torch.cat(places).to(device))
    return known[size, device]


def truncate_scale(scale: Tensor) -> Tensor:
    """The next bfloat16 towards zero, as float32: rounding up could push the largest value to infinity."""
    return (scale.view(torch.int32) & -0x10000).view(torch.float32)


class BlockCode(ValueCode):
    """Scales of all blocks, then `code_bits` for each entry."""

    size: int
    code_bits: int
    writes_nan = False

    @property
    def bits(self) -> float:  # type: ignore[override]
        return self.code_bits + 8.0 * SCALE_BYTES / self.size

    def nbytes(self, table: RowTable) -> int:
        scales = SCALE_BYTES * count_blocks(table, self.size)
        return scales + -(-table.entries * self.code_bits // 8)

    def encode(self, values: Tensor, table: RowTable) -> Tensor:
        blocks = cut_blocks(table, self.size, values.device)
        matrix = blocks.matrix(values)
        scales = truncate_scale(self._scales(matrix))
        codes = blocks.entries(self._codes(matrix, scales[:, None]))
        return torch.cat([scales.bfloat16().view(torch.uint8), self._pack(codes)])

    def decode(self, raw: Tensor, table: RowTable) -> Tensor:
        blocks = cut_blocks(table, self.size, raw.device)
        at = SCALE_BYTES * blocks.count
        scales = raw[:at].view(torch.bfloat16).float()
        legal = (scales >= 0) & (scales * self._peak <= LARGEST)
        scales = torch.where(legal, scales, torch.nan)
        return self._unpack(raw[at:], table.entries) * blocks.spread(scales)

    _peak: int
    """The largest multiple of the scale that is written."""

    @abstractmethod
    def _scales(self, matrix: Tensor) -> Tensor: ...

    @abstractmethod
    def _codes(self, matrix: Tensor, scales: Tensor) -> Tensor: ...

    @abstractmethod
    def _pack(self, codes: Tensor) -> Tensor: ...

    @abstractmethod
    def _unpack(self, raw: Tensor, entries: int) -> Tensor:
        """float32 multiples of the scale; NaN for a code that is never written."""


@dataclass(frozen=True)
class IntCode(BlockCode):
    """Whole numbers -peak..peak; the scale puts the block's largest magnitude at the peak."""

    name: str
    code_bits: int
    size: int

    @property
    def _peak(self) -> int:  # type: ignore[override]
        return (1 << (self.code_bits - 1)) - 1

    def _scales(self, matrix: Tensor) -> Tensor:
        return (matrix.abs().amax(1) / self._peak).clamp(min=SMALLEST_SCALE)

    def _codes(self, matrix: Tensor, scales: Tensor) -> Tensor:
        return (matrix / scales).round().clamp(-self._peak, self._peak).to(torch.int8)

    def _pack(self, codes: Tensor) -> Tensor:
        if self.code_bits == 8:
            return codes.view(torch.uint8)
        halves = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(torch.uint8) & 0xF
        return halves[0::2] | (halves[1::2] << 4)

    def _unpack(self, raw: Tensor, entries: int) -> Tensor:
        if self.code_bits == 8:
            codes = raw.view(torch.int8)
        else:
            halves = torch.stack([raw & 0xF, raw >> 4], 1).view(-1)[:entries]
            codes = (halves << 4).view(torch.int8) >> 4
        return torch.where(codes < -self._peak, torch.nan, codes.float())


@dataclass(frozen=True)
class Fp8Code(BlockCode):
    """8-bit floating-point numbers (e4m3); the scale puts the block's largest magnitude at their largest, 448.

    Twelve bits times a power of two, so the argument above holds for it too.
    """

    name: str
    size: int
    code_bits = 8
    _peak = 448

    def _scales(self, matrix: Tensor) -> Tensor:
        return (matrix.abs().amax(1) / self._peak).clamp(min=SMALLEST_SCALE)

    def _codes(self, matrix: Tensor, scales: Tensor) -> Tensor:
        codes = (matrix / scales).clamp(-self._peak, self._peak).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8)

    def _pack(self, codes: Tensor) -> Tensor:
        return codes

    def _unpack(self, raw: Tensor, entries: int) -> Tensor:
        return raw.contiguous().view(torch.float8_e4m3fn).float()


@dataclass(frozen=True)
class SignCode(BlockCode):
    """One bit per entry; every value of a block becomes plus or minus the mean magnitude of those that are not zero.

    A zero becomes a plus: there is no third code.
    """

    name: str
    size: int
    code_bits = 1
    has_zero = False
    _peak = 1

    def _scales(self, matrix: Tensor) -> Tensor:
        # Halving keeps the order of the additions apart from how many blocks the bucket happens to have.
        total = matrix.abs().double()
        while total.shape[1] > 1:
            half = total.shape[1] // 2
            total = total[:, :half] + total[:, half:]
        nonzero = (matrix != 0).sum(1).clamp(min=1)
        return (total[:, 0] / nonzero).clamp(max=LARGEST).float()

    def _codes(self, matrix: Tensor, scales: Tensor) -> Tensor:
        return (matrix < 0).to(torch.uint8)

    def _pack(self, codes: Tensor) -> Tensor:
        return collapse_bits(codes)

    def _unpack(self, raw: Tensor, entries: int) -> Tensor:
        return 1.0 - 2.0 * expand_bits(raw)[:entries].float()


@dataclass(frozen=True)
class PairCode(BlockCode):
    """Two bits per entry: a sign, and whether the magnitude is nearer to the block's largest or to half of it.

    For entries chosen by magnitude, which lie in that range. There is no code for zero.
    """

    name: str
    size: int
    code_bits = 2
    has_zero = False
    _peak = 2

    def _scales(self, matrix: Tensor) -> Tensor:
        scales = matrix.abs().amax(1) / self._peak
        return torch.where(scales < SMALLEST_SCALE, 0.0, scales)

    def _codes(self, matrix: Tensor, scales: Tensor) -> Tensor:
        return (matrix < 0).to(torch.uint8) | ((matrix.abs() >= 1.5 * scales).to(torch.uint8) << 1)

    def _pack(self, codes: Tensor) -> Tensor:
        return collapse_bits(torch.stack([codes & 1, codes >> 1], 1).view(-1))

    def _unpack(self, raw: Tensor, entries: int) -> Tensor:
        negative, large = expand_bits(raw)[: 2 * entries].view(-1, 2).float().unbind(1)
        return (1.0 - 2.0 * negative) * (1.0 + large)
