"""The quantised sum as the paper would have it: one process, one tensor, one block at a time."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def bf16_towards_zero(value: float) -> float:
    bits = np.float32(value).view(np.int32) & np.int32(-0x10000)
    return float(bits.view(np.float32))


def quantise_block(block: Tensor, bits: int) -> Tensor:
    """What a block of float32 becomes, rounded to nearest."""
    values = block.tolist()
    sizes = [abs(value) for value in values]
    tiny = torch.finfo(torch.float32).tiny
    if bits == 16:
        return block.bfloat16().float()
    if bits in (8, 4):
        peak = 2 ** (bits - 1) - 1
        largest = np.float32(max(sizes)) * np.float32(1 / peak)
        scale = np.float32(bf16_towards_zero(max(float(largest), tiny)))
        codes = [round(float(np.float32(v) * (np.float32(1) / scale))) for v in values]
        return torch.tensor([max(-peak, min(peak, code)) * scale for code in codes])
    if bits == 1:
        scale = bf16_towards_zero(math.fsum(sizes) / len(sizes))
        scale = 0.0 if scale < tiny else scale
        return torch.tensor([-scale if value < 0 else scale for value in values])
    assert bits == 2
    cut = 0.75 * math.fsum(sizes) / len(sizes)
    for _ in range(3):
        above = [size for size in sizes if size > cut]
        mean = math.fsum(above) / max(1, len(above))
        cut = mean / 2
    scale = bf16_towards_zero(mean)
    scale = 0.0 if scale < tiny else scale
    return torch.tensor(
        [math.copysign(scale, v) if abs(v) > scale / 2 and scale else 0.0 for v in values]
    )


def owners(name: str, blocks: int, world: int) -> list[int]:
    """Who adds up each block of a parameter."""
    turn = zlib.crc32(name.encode()) % world
    found = []
    for part in range(world):
        run = range(part * blocks // world, (part + 1) * blocks // world)
        found += [(part + turn) % world] * len(run)
    return found


@dataclass
class Reference:
    """One parameter on all ranks."""

    name: str
    world: int
    bits: int
    block: int

    def __post_init__(self) -> None:
        self.residuals: list[Tensor] = []

    def step(self, gradients: Sequence[Tensor]) -> Tensor:
        """The update; the residuals follow."""
        flat = [gradient.reshape(-1) for gradient in gradients]
        held = self.residuals or [torch.zeros_like(one) for one in flat]
        c = [residual + gradient for residual, gradient in zip(held, flat, strict=True)]
        pieces = [one.split(self.block) for one in c]
        update = []
        for index, owner in enumerate(owners(self.name, len(pieces[0]), self.world)):
            blocks = [piece[index] for piece in pieces]
            sent = [
                one if rank == owner else quantise_block(one, self.bits)
                for rank, one in enumerate(blocks)
            ]
            total = sent[0].clone()
            for one in sent[1:]:
                total += one
            final = quantise_block(total, self.bits)
            for rank, one in enumerate(blocks):
                one.copy_(total - final if rank == owner else one - sent[rank])
            update.append(final * (1 / self.world))
        self.residuals = c
        return torch.cat(update).view(gradients[0].shape)
