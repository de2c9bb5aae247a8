"""ParameterInfo: what is known of a parameter before any gradient exists, and how models are described.

Names are canonical: fully qualified, without wrapper prefixes, the first name of tied weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from thinwire.layout.slots import BucketLayout, Shard, Slot, SlotKind

WRAPPER_PREFIXES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@dataclass(frozen=True)
class ParameterInfo:
    """What the plan needs to know of a parameter. Of a sharded one, `shape` and `strides` are those of this rank's shard."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    kind: SlotKind
    module_type: type | None = field(compare=False, default=None)
    shard: Shard | None = None
    """Which part of the full parameter this is; None = all of it."""

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def full_shape(self) -> tuple[int, ...]:
        return self.shape if self.shard is None else self.shard.full_shape

    @cached_property
    def full(self) -> ParameterInfo:
        """The parameter as it would be if nobody had cut it: what rules and thresholds are about."""
        if self.shard is None:
            return self
        shape = self.full_shape
        return replace(self, shape=shape, strides=contiguous_strides(shape), shard=None)

    def slot(self, offset: int) -> Slot:
        shard = self.shard or Shard(self.shape)
        return Slot(self.name, self.shape, self.strides, offset, self.kind, shard)


def lay_out(
    infos: Iterable[ParameterInfo], dtype: torch.dtype, device: torch.device
) -> BucketLayout:
    """A bucket of these parameters, one behind the other, each followed by the padding of its shard."""
    slots, offset = [], 0
    for info in infos:
        slots.append(info.slot(offset))
        offset += info.numel + (info.shard.padding if info.shard is not None else 0)
    return BucketLayout(tuple(slots), offset, dtype, device)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor: its shard of a DTensor, in the same memory, else all of it."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which numbers of this dtype are worked with and kept: float64 stays, all others become float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
