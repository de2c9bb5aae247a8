"""Fingerprints: 64 bits that tell whether tensors have the same bits. Computed where the tensors are; the host waits for nothing.

Every word of a tensor, taken as a whole number, is multiplied with an odd number of its own, and all are added modulo 2^64. A
bit that flips changes the sum by an odd number times a power of two, so a single one is always seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

CHUNK = 1 << 22
"""Words that are multiplied at a time, which bounds the memory that it takes."""
BLOCK = 1 << 18
"""Words that a CPU multiplies at a time, which stay in its cache."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""By bytes. None is wider than 32 bits: the highest bits of a product are lost, and two that flip there would cancel out."""

_weights: dict[torch.device, list[Tensor]] = {}
"""By device, the longest last. Shorter ones stay, because another stream may still read them."""


def weights(count: int, device: torch.device) -> Tensor:
    """int64 [count]: odd numbers without a pattern, the first ones of a list that is the same on every device."""
    held = _weights.setdefault(device, [])
    if not held or held[-1].numel() < count:
        size = 1 << max(10, (count - 1).bit_length())
        mixed = torch.arange(1, size + 1) * -7046029254386353131
        mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
        mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
        held.append((mixed ^ (mixed >> 31) | 1).to(device))
    return held[-1][:count]


def fingerprint(tensors: Sequence[Tensor], chunk: int = CHUNK) -> Tensor:
    """int64 []: of all the tensors, in their order. Zeros count for nothing, and neither do empty tensors."""
    sums = [weighted_sum(pieces) for pieces in chunks_of(tensors, chunk)]
    if not sums:
        return torch.zeros((), dtype=torch.int64)
    return weighted_sum([torch.stack(sums)])


def weighted_sum(pieces: Sequence[Tensor]) -> Tensor:
    """int64 []: of the words of some pieces, one after the other, each times its own number."""
    device = pieces[0].device
    numbers = weights(sum(piece.numel() for piece in pieces), device)
    if device.type != "cpu":
        words = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
        return torch.mul(words, numbers).sum()
    total, begin = torch.zeros((), dtype=torch.int64), 0
    for piece in pieces:
        for block in piece.split(BLOCK):
            total += torch.dot(block.to(torch.int64), numbers[begin : begin + block.numel()])
            begin += block.numel()
    return total


def row_fingerprints(rows: Tensor, chunk: int = CHUNK) -> Tensor:
    """int64 [rows]: of every row of a matrix."""
    words = as_words(rows)
    total = words.new_zeros(words.shape[0], dtype=torch.int64)
    for factor, part in enumerate(words.split(chunk, dim=1)):
        total += torch.mul(part, weights(part.shape[1], part.device)).sum(1) * (2 * factor + 1)
    return total


def chunks_of(tensors: Sequence[Tensor], chunk: int) -> Iterator[list[Tensor]]:
    """The tensors as flat pieces of words, several together; all of a list have one dtype and fit in a chunk."""
    waiting: list[Tensor] = []
    room = chunk
    for tensor in tensors:
        flat = as_words(flat_in_memory_order(tensor))
        for piece in flat.split(chunk) if flat.numel() else ():
            if waiting and (piece.numel() > room or piece.dtype != waiting[0].dtype):
                yield waiting
                waiting, room = [], chunk
            waiting.append(piece)
            room -= piece.numel()
    if waiting:
        yield waiting


def flat_in_memory_order(tensor: Tensor) -> Tensor:
    """1-D; the same memory for every dense layout."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.detach().permute(order).reshape(-1)


def as_words(values: Tensor) -> Tensor:
    """The same bits as whole numbers; bytes as wider words where they come in fours."""
    size = values.element_size()
    if size == 1 and values.shape[-1] % 4 == 0:
        flat = values.reshape(-1)
        aligned = flat.data_ptr() % 4 == 0 and flat.storage_offset() % 4 == 0
        words = (flat if aligned else flat.clone()).view(torch.int32)
        return words.view(*values.shape[:-1], values.shape[-1] // 4)
    return values.view(WORDS[size])
