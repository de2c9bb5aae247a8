"""Bit fields in int32 words: what the packed index codes are written with.

Bit p of a stream is bit p mod 32 of word p // 32, which on a little-endian machine is bit p mod 8 of byte p // 8.
Every function is a fixed number of tensor operations with shapes known beforehand, so none waits for a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32
FIELD_BITS = 31
"""The widest single field: shifted by up to 31 places it still fits a signed 64-bit number."""
WORD_MASK = (1 << WORD_BITS) - 1
SPARE_WORDS = 2
"""A field touches its word and the next one, also where the stream is empty and the fields have no width."""


def words_for(bits: int) -> int:
    """How many words hold so many bits."""
    return -(-bits // WORD_BITS)


def write_fields(values: Tensor, offsets: Tensor, words: int) -> Tensor:
    """int32 [words] with `values` (int64, below 2**31) at their bit offsets; fields must not overlap."""
    at = offsets >> 5
    shifted = values << (offsets & 31)
    wide = torch.zeros(words + SPARE_WORDS, dtype=torch.int64, device=values.device)
    # Adding whole numbers that share no bits is the same in any order, so this is exact on every device.
    wide.index_add_(0, at, shifted & WORD_MASK)
    wide.index_add_(0, at + 1, shifted >> WORD_BITS)
    return wide[:words].to(torch.int32)


def read_fields(words: Tensor, offsets: Tensor, width: int) -> Tensor:
    """int64: the fields of `width` <= 31 bits at the given bit offsets."""
    wide = torch.cat([words.long() & WORD_MASK, words.new_zeros(SPARE_WORDS, dtype=torch.int64)])
    at = offsets >> 5
    pair = wide[at] | (wide[at + 1] << WORD_BITS)
    return (pair >> (offsets & 31)) & ((1 << width) - 1)


def pack(values: Tensor, width: int) -> Tensor:
    """int32 words with the numbers (int64, below 2**width, width <= 62) one after the other."""
    words = words_for(values.numel() * width)
    offsets = torch.arange(values.numel(), device=values.device) * width
    low = write_fields(values & ((1 << FIELD_BITS) - 1), offsets, words)
    if width <= FIELD_BITS:
        return low
    return low | write_fields(values >> FIELD_BITS, offsets + FIELD_BITS, words)


def unpack(words: Tensor, count: int, width: int) -> Tensor:
    """int64 [count]: what `pack` wrote."""
    offsets = torch.arange(count, device=words.device) * width
    low = read_fields(words, offsets, min(width, FIELD_BITS))
    if width <= FIELD_BITS:
        return low
    return low | (read_fields(words, offsets + FIELD_BITS, width - FIELD_BITS) << FIELD_BITS)


def set_bits(offsets: Tensor, words: int) -> Tensor:
    """int32 [words] with ones at the given, different, offsets."""
    return write_fields(torch.ones_like(offsets), offsets, words)


def expand_bits(raw: Tensor) -> Tensor:
    """uint8 zeros and ones, one for every bit of a tensor of words or bytes."""
    places = torch.arange(8, dtype=torch.uint8, device=raw.device)
    return ((raw.view(torch.uint8)[:, None] >> places) & 1).view(-1)


def collapse_bits(bits: Tensor) -> Tensor:
    """uint8 bytes from zeros and ones (uint8), padded with zeros to a whole byte."""
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (padded << places).sum(1, dtype=torch.uint8)
