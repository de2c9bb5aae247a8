"""Row coders: three ways to write the ascending indices of many equal rows close to the entropy.

All take an int64 matrix [rows, keep] whose rows never fall, and have a size that follows from the shape alone. A repeated index
is allowed (places left over sit at the end of their row), which costs about 1.44 x density bits per entry. What
does not decode comes back as -1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.wire.bits import expand_bits, pack, set_bits, unpack, words_for, write_fields

RANK_BITS = 62
"""Ranks stay below 2**62, so that sums and comparisons of signed 64-bit numbers are safe."""
TABLE_LIMIT = 1 << 20
"""The most binomials one enumerated shape may keep in memory."""


class RowCoder(ABC):
    """Writes rows of one length with one number of entries."""

    length: int
    keep: int

    @abstractmethod
    def row_bits(self) -> float:
        """Bits one row takes when there are many."""

    @abstractmethod
    def words(self, rows: int) -> int:
        """int32 words that so many rows take."""

    @abstractmethod
    def encode(self, indices: Tensor) -> Tensor:
        """int32 [words]."""

    @abstractmethod
    def decode(self, words: Tensor, rows: int) -> Tensor:
        """int64 [rows, keep]."""

    def used_bits(self, indices: Tensor) -> int:
        """Bits that carry these rows, without the end of the buffer that only the worst case needs."""
        return math.ceil(self.row_bits() * indices.shape[0])


@dataclass(frozen=True)
class RiceRows(RowCoder):
    """Rice's run lengths in two streams.

    1. The gap to the index before (the first: to 0) is cut into `low` bits and a quotient.
    2. The low bits form one stream of fixed width.
    3. The quotients form a second stream, each as that many zeros and a one.
    The gaps of a row sum to less than L, so its quotients sum to at most (L - 1) >> low: the second stream has a bound.
    Decoding finds all ones at once (a prefix sum), so no entry waits for the one before.
    """

    length: int
    keep: int
    low: int

    @classmethod
    def best(cls, length: int, keep: int) -> RiceRows:
        widths = range(max(1, length.bit_length()))
        return min((cls(length, keep, low) for low in widths), key=cls.row_bits)

    def row_bits(self) -> float:
        return self.keep * (self.low + 1) + self._most_zeros

    @property
    def _most_zeros(self) -> int:
        return (self.length - 1) >> self.low

    def _streams(self, rows: int) -> tuple[int, int]:
        low = words_for(rows * self.keep * self.low)
        return low, words_for(rows * (self.keep + self._most_zeros))

    def words(self, rows: int) -> int:
        return sum(self._streams(rows))

    def encode(self, indices: Tensor) -> Tensor:
        gaps = indices.diff(prepend=torch.zeros_like(indices[:, :1])).view(-1)
        ends = ((gaps >> self.low) + 1).cumsum(0) - 1
        low = pack(gaps & ((1 << self.low) - 1), self.low)
        return torch.cat([low, set_bits(ends, self._streams(indices.shape[0])[1])])

    def decode(self, words: Tensor, rows: int) -> Tensor:
        entries = rows * self.keep
        boundary = self._streams(rows)[0]
        low = unpack(words[:boundary], entries, self.low)
        ends, whole = find_ones(words[boundary:], entries)
        zeros = ends.diff(prepend=ends.new_full((1,), -1)) - 1
        gaps = (zeros << self.low) | low
        indices = gaps.view(rows, self.keep).cumsum(1)
        return torch.where(whole, indices, -1)

    def used_bits(self, indices: Tensor) -> int:
        gaps = indices.diff(prepend=torch.zeros_like(indices[:, :1]))
        return indices.numel() * (self.low + 1) + int((gaps >> self.low).sum())


def find_ones(words: Tensor, expected: int) -> tuple[Tensor, Tensor]:
    """(int64 [expected] positions of the ones, bool [] whether there are exactly so many)."""
    bits = expand_bits(words)
    ranks = bits.cumsum(0, dtype=torch.int64)
    # A place of its own takes every bit that is no expected one: a scatter needs no data-dependent shape.
    target = torch.where(bits.bool() & (ranks <= expected), ranks - 1, expected)
    found = torch.zeros(expected + 1, dtype=torch.int64, device=words.device)
    found.scatter_(0, target, torch.arange(bits.numel(), device=words.device))
    return found[:expected], ranks[-1] == expected


@dataclass(frozen=True)
class EnumeratedRows(RowCoder):
    """Cover's enumeration: a row is its number among all rows of its shape; `together` rows share one number.

    1. a_j = i_j + j makes the indices i_0 <= i_1 <= ... strictly ascending below L + k - 1.
    2. The row's rank is the sum of C(a_j, j + 1), below N = C(L + k - 1, k).
    3. `together` ranks are the digits of one number to the base N, written in `width` bits.
    The size is fixed and nothing is left over, so it is best wherever a rank fits a machine word.
    """

    length: int
    keep: int
    together: int
    width: int

    @classmethod
    def best(cls, length: int, keep: int) -> EnumeratedRows | None:
        """None where a row has too many possibilities for a 62-bit rank, or its table would be large."""
        # With keep <= length no binomial of the table is larger than the number of rows, `base`.
        if keep > min(length, RANK_BITS) or keep * (length + keep) > TABLE_LIMIT:
            return None
        base = math.comb(length + keep - 1, keep)
        if base.bit_length() > RANK_BITS:
            return None
        most = 1
        while most < RANK_BITS and (base ** (most + 1) - 1).bit_length() <= RANK_BITS:
            most += 1
        shapes = [(n, (base**n - 1).bit_length()) for n in range(1, most + 1)]
        together, width = min(shapes, key=lambda shape: shape[1] / shape[0])
        return cls(length, keep, together, width)

    @property
    def _base(self) -> int:
        return math.comb(self.length + self.keep - 1, self.keep)

    def row_bits(self) -> float:
        return self.width / self.together

    def words(self, rows: int) -> int:
        return words_for(-(-rows // self.together) * self.width)

    def encode(self, indices: Tensor) -> Tensor:
        rows = indices.shape[0]
        table = binomials(self.length + self.keep - 1, self.keep, indices.device)
        steps = torch.arange(self.keep, device=indices.device)
        ranks = table[steps, indices + steps].sum(1)
        digits = torch.nn.functional.pad(ranks, (0, -rows % self.together)).view(-1, self.together)
        number = torch.zeros_like(digits[:, 0])
        for digit in reversed(range(self.together)):
            number = number * self._base + digits[:, digit]
        return pack(number, self.width)

    def decode(self, words: Tensor, rows: int) -> Tensor:
        number = unpack(words, -(-rows // self.together), self.width)
        digits = []
        for _ in range(self.together):
            digits.append(number % self._base)
            number = number // self._base
        too_large = (number != 0).repeat_interleave(self.together)[:rows]
        rank = torch.stack(digits, 1).view(-1)[:rows]
        table = binomials(self.length + self.keep - 1, self.keep, words.device)
        columns = []
        for step in reversed(range(self.keep)):
            column = torch.searchsorted(table[step], rank, right=True) - 1
            rank = rank - table[step][column]
            columns.append(column - step)
        indices = torch.stack(columns[::-1], 1)
        return torch.where(too_large[:, None], -1, indices)


@lru_cache(maxsize=256)
def binomials(tops: int, keep: int, device: torch.device) -> Tensor:
    """int64 [keep, tops]: C(n, j + 1) for n < tops."""
    column = torch.arange(tops)
    table = [column]
    for _ in range(1, keep):
        # C(n, j + 1) = sum of C(m, j) over m < n.
        column = torch.cat([column.new_zeros(1), column[:-1].cumsum(0)])
        table.append(column)
    return torch.stack(table).to(device)


@dataclass(frozen=True)
class BitmapRows(RowCoder):
    """One bit for every element of the row; cheapest where about a quarter or more is sent."""

    length: int
    keep: int

    def row_bits(self) -> float:
        return float(self.length)

    def words(self, rows: int) -> int:
        return words_for(rows * self.length)

    def encode(self, indices: Tensor) -> Tensor:
        rows = indices.shape[0]
        new = indices.diff(prepend=torch.full_like(indices[:, :1], -1)) != 0
        starts = torch.arange(rows, device=indices.device)[:, None] * self.length
        return write_fields(new.long().view(-1), (indices + starts).view(-1), self.words(rows))

    def decode(self, words: Tensor, rows: int) -> Tensor:
        bits = expand_bits(words)[: rows * self.length].view(rows, self.length)
        ranks = bits.cumsum(1, dtype=torch.int64)
        target = torch.where(bits.bool() & (ranks <= self.keep), ranks - 1, self.keep)
        # Places left over repeat the row's last index, where the encoder put them.
        indices = torch.full(
            (rows, self.keep + 1), self.length - 1, dtype=torch.int64, device=words.device
        )
        places = torch.arange(self.length, device=words.device).expand(rows, -1)
        indices.scatter_(1, target, places)
        ones = ranks[:, -1]
        whole = (ones == self.keep) | ((ones < self.keep) & (bits[:, -1] == 1))
        return torch.where(whole[:, None], indices[:, : self.keep], -1)


@lru_cache(maxsize=1024)
def choose_coder(length: int, keep: int) -> RowCoder:
    """The coder with the smallest guaranteed size for rows of this shape."""
    coders: list[RowCoder] = [RiceRows.best(length, keep), BitmapRows(length, keep)]
    enumerated = EnumeratedRows.best(length, keep)
    if enumerated is not None:
        coders.insert(0, enumerated)
    return min(coders, key=lambda coder: coder.row_bits())
