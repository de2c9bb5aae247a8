"""FlatStore: one tensor of state per parameter name, kept in flat buffers that follow the bucket layout.

Encoding wants one flat buffer per group of slots; checkpoints want one tensor per name. When DDP re-buckets, or
a policy regroups, the store moves the values by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.journal import Journal
from thinwire.layout import Group, Slot


def let_go(tensor: Tensor) -> None:
    """Drop a tensor that the current stream may still read. Its memory is used again when that stream is through.

    Without this the stream that made the tensor, often another one, could use the memory at once.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


class Buffers(NamedTuple):
    """What a step reads and writes of a binding."""

    held: Tensor
    """What is held, before the step."""
    now: Tensor
    """Where the step writes what is to be held afterwards: the same buffer where steps cannot be taken back."""
    ratio: Tensor | None
    """float32 [1] that `held` has to be multiplied with to be in the units of the step's gradients; None if with nothing."""

    def in_units(self) -> Tensor:
        """What is held, in the units of the gradients: to read, and perhaps in `now` already."""
        return self.held if self.ratio is None else torch.mul(self.held, self.ratio, out=self.now)

    def brought(self) -> Tensor:
        """`now` with that in it: for those who change it in place."""
        values = self.in_units()
        return values if values is self.now else self.now.copy_(values)


@dataclass(eq=False)
class Binding:
    """A group's flat buffer. Under a GradScaler it holds `units` x the stored quantity.

    With a `journal` there are two buffers, which take turns: a step reads one and writes the other, and a bad verdict
    copies the first to the second.
    """

    group: Group
    flat: Tensor
    units: Tensor | None = None
    journal: Journal | None = None

    def __post_init__(self) -> None:
        self._spare = None if self.journal is None else torch.zeros_like(self.flat)

    def begin(self, scale: Tensor | None) -> Buffers:
        """Begin a step with gradients scaled by `scale`. Everything in `now` has to be written."""
        held = self.flat
        if self.journal is not None:
            assert self._spare is not None
            self.flat, self._spare = self._spare, self.flat
            self.journal.note(self.flat, held)
        return Buffers(held, self.flat, self._change_units(scale))

    def _change_units(self, scale: Tensor | None) -> Tensor | None:
        """The buffer is in units of `scale` from now on. Returns what brings it there."""
        if scale is None:
            return None
        ratio = scale if self.units is None else scale / self.units
        before, self.units = self.units, scale.clone()
        if self.journal is not None:
            self.journal.note(self.units, torch.ones_like(scale) if before is None else before)
        if ratio.device.type == "cpu" and float(ratio) == 1.0:
            return None
        return ratio.reshape(1).float()

    def lift(self, flag: Tensor | None = None) -> Tensor:
        """The buffer to go on in, in the units in which it is held. With a flag (a byte) it is filled only if that is up."""
        return self.flat

    def rest(self, flat: Tensor, flag: Tensor | None = None) -> None:
        """The step's work in the opened buffer is done; narrow storages pack it here. With a flag, only if that is up."""

    def read(self, slot: Slot) -> Tensor:
        values = slot.view(self.flat)
        return values / self.units if self.units is not None else values.clone()

    def put(self, slot: Slot, values: Tensor) -> None:
        """Replace a slot's values, given in plain units."""
        slot.view(self.flat).copy_(values if self.units is None else values * self.units)

    def nbytes(self) -> int:
        return self.flat.nbytes if self._spare is None else 2 * self.flat.nbytes


class FlatStore:
    def __init__(self) -> None:
        self.journal: Journal | None = None
        """Where steps note what they change, set before the first one; None where they change it in place."""
        self._bindings: dict[Group, Binding] = {}
        self._owner: dict[str, tuple[Binding, Slot]] = {}
        self._loose: dict[str, Tensor] = {}
        """Loaded or orphaned values that no group has claimed yet, in the parameter's shape and in plain units."""

    def bind(self, group: Group) -> Binding:
        """The group's flat buffer, carrying over what any of its names held before."""
        binding = self._bindings.get(group)
        if binding is None:
            binding = self.make_binding(group)
            for slot in group.slots:
                held = self.take(slot.name)
                if held is not None:
                    binding.put(slot, held)
                self._owner[slot.name] = (binding, slot)
            self._bindings[group] = binding
        return binding

    def make_binding(self, group: Group) -> Binding:
        flat = torch.zeros(group.numel, dtype=group.dtype, device=group.device)
        return Binding(group, flat, journal=self.journal)

    def read(self, name: str) -> Tensor | None:
        """A copy in the parameter's shape and in plain units, or None if nothing is held."""
        if name in self._owner:
            binding, slot = self._owner[name]
            return binding.read(slot)
        held = self._loose.get(name)
        return held.clone() if held is not None else None

    def view(self, name: str) -> Tensor | None:
        """What is held itself, not a copy, in the parameter's shape; in the units in which it is held."""
        if name in self._owner:
            binding, slot = self._owner[name]
            return slot.view(binding.flat)
        return self._loose.get(name)

    def take(self, name: str) -> Tensor | None:
        """Like `read`, and forget it. The binding it came from dissolves: its other names become loose."""
        held = self.read(name)
        if name in self._owner:
            binding, _ = self._owner[name]
            self._dissolve(binding)
        if name in self._loose:
            let_go(self._loose.pop(name))
        return held

    def write(self, name: str, values: Tensor) -> None:
        """Replace what is held under a name."""
        if name in self._owner:
            binding, slot = self._owner[name]
            binding.put(slot, values)
        else:
            self._loose[name] = values.clone()

    def release(self, names: Iterable[str]) -> None:
        for name in names:
            self.take(name)

    def names(self) -> set[str]:
        return set(self._owner) | set(self._loose)

    def resting_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """What the values of a parameter take between steps, held once."""
        return numel * (8 if dtype == torch.float64 else 4)

    def nbytes(self) -> int:
        bound = sum(binding.nbytes() for binding in self._bindings.values())
        return bound + sum(values.nbytes for values in self._loose.values())

    def _dissolve(self, binding: Binding) -> None:
        for slot in binding.group.slots:
            self._loose[slot.name] = binding.read(slot)
            del self._owner[slot.name]
        del self._bindings[binding.group]
