"""Bucket and Slot: one flat gradient buffer and the named parameters inside it.

Names are canonical (fully qualified, no wrapper prefixes, the first name of tied weights) and are the only
key under which state is kept: DDP re-buckets after the first step, so anything keyed by bucket would break.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

WRAPPER_PREFIXES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


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
    size: int | None = None
    """How much of `dim`, or how many elements, the part has; None = all."""

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
    """One parameter inside a flat buffer.

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


@dataclass(frozen=True, eq=False)
class Bucket:
    """One flat gradient buffer, filled with this rank's local gradient."""

    layout: BucketLayout
    flat: Tensor


@dataclass(frozen=True)
class ParameterInfo:
    """What the plan needs to know of a parameter before any gradient exists."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    kind: SlotKind
    module_type: type | None = field(compare=False, default=None)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    def slot(self, offset: int) -> Slot:
        return Slot(self.name, self.shape, self.strides, offset, self.kind, Shard(self.shape))


def canonical_name(name: str) -> str:
    """Drop what torch.compile, activation checkpointing and FSDP add to a parameter's name."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PREFIXES)


def memory_strides(parameter: Tensor) -> tuple[int, ...]:
    """Strides of the parameter's gradient inside a flat buffer: its own if dense in memory, else contiguous."""
    expected = 1
    dims = [dim for dim in range(parameter.ndim) if parameter.shape[dim] > 1]
    for dim in sorted(dims, key=parameter.stride):
        if parameter.stride(dim) != expected:
            return contiguous_strides(parameter.shape)
        expected *= parameter.shape[dim]
    return tuple(parameter.stride())


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def describe_module(module: nn.Module) -> dict[str, tuple[nn.Parameter, ParameterInfo]]:
    """All trainable parameters by canonical name, in registration order, each tied weight once."""
    owners: dict[int, tuple[nn.Module, str]] = {}
    for owner in module.modules():
        for local_name, parameter in owner.named_parameters(recurse=False):
            owners.setdefault(id(parameter), (owner, local_name))
    table: dict[str, tuple[nn.Parameter, ParameterInfo]] = {}
    for full_name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        owner, local_name = owners[id(parameter)]
        kind = kind_in_module(owner, local_name, parameter)
        name = canonical_name(full_name)
        table[name] = (parameter, _info(name, parameter, kind, type(owner)))
    return table


def describe_parameters(
    named: Iterable[tuple[str, nn.Parameter]],
) -> dict[str, tuple[nn.Parameter, ParameterInfo]]:
    """The same table when only names and tensors are known; kinds are guessed from shapes."""
    table: dict[str, tuple[nn.Parameter, ParameterInfo]] = {}
    for full_name, parameter in named:
        if parameter.requires_grad:
            name = canonical_name(full_name)
            table[name] = (parameter, _info(name, parameter, kind_from_shape(parameter.ndim), None))
    return table


def _info(
    name: str, parameter: nn.Parameter, kind: SlotKind, module_type: type | None
) -> ParameterInfo:
    return ParameterInfo(
        name,
        tuple(parameter.shape),
        memory_strides(parameter),
        parameter.dtype,
        kind,
        module_type,
    )


def kind_from_shape(ndim: int) -> SlotKind:
    if ndim <= 1:
        return SlotKind.VECTOR
    return SlotKind.LINEAR if ndim == 2 else SlotKind.CONV


def kind_in_module(owner: nn.Module, local_name: str, parameter: Tensor) -> SlotKind:
    """A parameter's kind from the module that owns it."""
    if parameter.ndim <= 1:
        return SlotKind.VECTOR
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return SlotKind.EMBEDDING
    if isinstance(owner, nn.modules.conv._ConvNd):
        return SlotKind.CONV
    # GPT-2's Conv1D keeps [in, out]; recognised by its attributes so that transformers is not needed.
    if type(owner).__name__ == "Conv1D" and hasattr(owner, "nf") and local_name == "weight":
        return SlotKind.TRANSPOSED_LINEAR
    if parameter.ndim == 2:
        return SlotKind.LINEAR
    return SlotKind.OTHER
