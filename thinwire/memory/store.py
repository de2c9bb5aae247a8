"""FlatStore: one tensor of state per parameter name, kept in flat buffers that follow the bucket layout.

Encoding wants one flat buffer per group of slots; checkpoints want one tensor per name. When DDP re-buckets, or
a policy regroups, the store moves the values by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.layout import Slot
from thinwire.plan.groups import Group


def let_go(tensor: Tensor) -> None:
    """Say of a tensor that is dropped now that the current stream still reads it; often another one made it, whose memory it
    would be again at once."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


@dataclass(eq=False)
class Binding:
    """A group's flat buffer. Under a GradScaler it holds `units` x the stored quantity."""

    group: Group
    flat: Tensor
    units: Tensor | None = None

    def open(self, scale: Tensor | None) -> Tensor:
        """The buffer to work in during a step, in the units of gradients scaled by `scale`."""
        self.rescale(scale)
        return self.flat

    def retarget(self, scale: Tensor | None) -> Tensor | None:
        """float32 [1] that the buffer has to be multiplied with to be in units of `scale`, None if with nothing.

        The caller multiplies.
        """
        if scale is None:
            return None
        ratio = scale if self.units is None else scale / self.units
        self.units = scale.clone()
        return ratio.reshape(1).float()

    def lift(self, flag: Tensor | None = None) -> Tensor:
        """The buffer to work in, in the units in which it is held. With a flag (a byte) it is filled only if that is up."""
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
        return self.flat.nbytes

    def rescale(self, scale: Tensor | None) -> None:
        """Bring the buffer to the units of gradients scaled by `scale`."""
        ratio = self.retarget(scale)
        if ratio is not None and (self.flat.device.type != "cpu" or float(ratio) != 1.0):
            self.flat.mul_(ratio)


class FlatStore:
    def __init__(self) -> None:
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
        return Binding(group, torch.zeros(group.numel, dtype=group.dtype, device=group.device))

    def read(self, name: str) -> Tensor | None:
        """A copy in the parameter's shape and in plain units, or None if nothing is held."""
        if name in self._owner:
            binding, slot = self._owner[name]
            return binding.read(slot)
        held = self._loose.get(name)
        return held.clone() if held is not None else None

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

    def nbytes(self) -> int:
        bound = sum(binding.nbytes() for binding in self._bindings.values())
        return bound + sum(values.nbytes for values in self._loose.values())

    def _dissolve(self, binding: Binding) -> None:
        for slot in binding.group.slots:
            self._loose[slot.name] = binding.read(slot)
            del self._owner[slot.name]
        del self._bindings[binding.group]
