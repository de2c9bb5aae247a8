"""Bucket and Slot: one flat gradient buffer and the named parameters inside it.

Names are canonical (fully qualified, no wrapper prefixes, the first name of tied weights) and are the only
key under which state is kept: DDP re-buckets after the first step, so anything keyed by bucket would break.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


class SlotKind(enum.Enum):
    """What a parameter is, as far as the choice of selection axis cares."""

    LINEAR = "linear"
    CONV = "conv"
    EMBEDDING = "embedding"
    VECTOR = "norm/bias"
    TRANSPOSED_LINEAR = "transposed linear"
    OTHER = "other"


@dataclass(frozen=True)
class Shard:
    """Which part of the full parameter a slot holds; a whole tensor is its own single shard."""

    full_shape: tuple[int, ...]
    dim: int | None = None
    """The dimension that was cut; None = none was, and a part is a run of elements in memory order."""
    offset: int = 0
    """Where the part begins along `dim`, or in memory order."""
    padding: int = 0
    """Elements behind the part in its flat buffer that belong to nobody."""
    size: int | None = None
    """How much of `dim`, or how many elements, the part has; None = all."""

    @property
    def whole(self) -> bool:
        return self.size is None

    @property
    def shape(self) -> tuple[int, ...]:
        """The part's own shape."""
        if self.size is None:
            return self.full_shape
        if self.dim is None:
            return (self.size,)
        return (*self.full_shape[: self.dim], self.size, *self.full_shape[self.dim + 1 :])


@dataclass(frozen=True)
class Slot:
    """One parameter, or this rank's shard of it, inside a flat buffer.

    `strides` describe memory, so `view` gives the logical tensor even for channels_last and transposed
    parameters, whose bytes in the bucket are not in logical order.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    kind: SlotKind
    shard: Shard

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's own logical view of its part of `flat`."""
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.offset)

    def span(self, flat: Tensor) -> Tensor:
        """The same elements as one contiguous 1-D piece, in memory order."""
        return flat[self.offset : self.offset + self.numel]

    def part(self, flat: Tensor, shard: Shard) -> Tensor:
        """A shard of this whole parameter in `flat`: a view in logical shape, or a run in memory order."""
        if shard.size is None:
            return self.view(flat)
        if shard.dim is None:
            return self.span(flat)[shard.offset : shard.offset + shard.size]
        return self.view(flat).narrow(shard.dim, shard.offset, shard.size)

    def at(self, offset: int) -> Slot:
        """The same parameter placed elsewhere."""
        return replace(self, offset=offset)


@dataclass(frozen=True, eq=False)
class BucketLayout:
    """Where each slot lies in a flat buffer; compared by identity, made once per DDP bucketing."""

    slots: tuple[Slot, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device
    joined: tuple[tuple[int, int], ...] = ()
    """(offset, elements) of the buffers it is made of, where these lie apart; what is between them belongs to others."""

    @property
    def buffers(self) -> tuple[tuple[int, int], ...]:
        """(offset, elements) of all memory that belongs to the bucket."""
        return self.joined or ((0, self.numel),)


@dataclass(frozen=True, eq=False)
class Bucket:
    """One flat gradient buffer, filled with this rank's local gradient."""

    layout: BucketLayout
    flat: Tensor
