"""Roster: which compressor each parameter is with, and how it moves from one to the next without losing anything.

Everything here happens between steps: switching to another plan, flushing what a parameter that turns dense still holds,
saving and loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.compressor import Compressor, FlushAccount, FlushCompressor
from thinwire.errors import UsageError
from thinwire.memory.base import MemoryState
from thinwire.memory.residual import Residual, ResidualState
from thinwire.methods.base import Method
from thinwire.plan.policy import SlotPlan

# Stores that mean the same in every memory that has them.
MOMENTUM = "momentum"
CARRIED = {"residual", MOMENTUM}


@dataclass
class Assignment:
    """Which compressor a parameter is with, how often it was exchanged, and where it goes after a flush."""

    plan: SlotPlan
    compressor: Compressor
    steps: int = 0
    after_flush: Compressor | None = None


class Roster:
    """All parameters of one handle by name; the methods they are assigned to share one compressor each."""

    def __init__(self, plan: dict[str, SlotPlan], device: torch.device) -> None:
        self.device = device
        self.compressors: dict[Method, Compressor] = {}
        self.assignments = {
            name: Assignment(slot_plan, self._compressor(slot_plan))
            for name, slot_plan in plan.items()
        }

    def _compressor(self, slot_plan: SlotPlan) -> Compressor:
        method = slot_plan.method
        if method not in self.compressors:
            self.compressors[method] = method.compressor()
        self.compressors[method].expect(slot_plan.info, self.device)
        return self.compressors[method]

    # -- moving ------------------------------------------------------------------------------------------------

    def switch(self, plan: dict[str, SlotPlan]) -> None:
        """Adopt a new plan. What is held back carries over to the new method or is flushed densely once."""
        for name, slot_plan in plan.items():
            assignment = self.assignments[name]
            old, new = assignment.compressor, self._compressor(slot_plan)
            assignment.plan = slot_plan
            if isinstance(old, FlushCompressor):
                assignment.after_flush = new
            elif old is not new and not self._carry_over(name, old, new):
                assert old.memory is not None
                assignment.compressor = FlushCompressor(old.memory)
                assignment.after_flush = new
            else:
                assignment.compressor = new
        self._merge_flushes()
        in_use = {id(a.compressor) for a in self.assignments.values()}
        in_use |= {id(a.after_flush) for a in self.assignments.values()}
        self.compressors = {m: c for m, c in self.compressors.items() if id(c) in in_use}

    def end_flushes(self, flushes: Sequence[FlushAccount]) -> bool:
        """Slots whose memory has been delivered move on to their next compressor and free it; whether any did.

        Whether a flush was delivered decides what is sent next, so the host has to know: the step after a slot turned
        dense is the one place where it waits for the device.
        """
        moved = False
        for account in flushes:
            for slot, delivered in zip(
                account.group.slots, account.delivered.tolist(), strict=True
            ):
                assignment = self.assignments[slot.name]
                if delivered and assignment.after_flush is not None:
                    assert assignment.compressor.memory is not None
                    self._hand_over(slot.name, assignment.compressor, assignment.after_flush)
                    assignment.compressor.memory.release([slot.name])
                    assignment.compressor = assignment.after_flush
                    assignment.after_flush = None
                    moved = True
        return moved

    def release(self) -> None:
        """Drop all that is held back."""
        for assignment in self.assignments.values():
            if assignment.compressor.memory is not None:
                assignment.compressor.memory.release([assignment.plan.info.name])

    # -- state ------------------------------------------------------------------------------------------------

    def memories(self) -> list[MemoryState]:
        """Every memory in use, each once."""
        found: dict[int, MemoryState] = {}
        for assignment in self.assignments.values():
            if assignment.compressor.memory is not None:
                found[id(assignment.compressor.memory)] = assignment.compressor.memory
        return list(found.values())

    def held(self, name: str, store: str) -> Tensor | None:
        """What a memory holds of a parameter, in its shape and in plain gradient units."""
        memory = self.assignments[name].compressor.memory
        return (
            memory.stores[store].read(name)
            if memory is not None and store in memory.stores
            else None
        )

    def state_dict(self) -> dict[str, Any]:
        memory: dict[str, dict[str, Tensor]] = {}
        selection: dict[str, Any] = {}
        for name, assignment in self.assignments.items():
            stores = assignment.compressor.memory.stores if assignment.compressor.memory else {}
            for store, contents in stores.items():
                held = contents.read(name)
                # Zeros where nothing is held yet: a distributed load fills the tensors it finds here.
                memory.setdefault(store, {})[name] = held if held is not None else self._zeros(name)
        for compressor in self.compressors.values():
            selection.update(compressor.state_dict(self._names_with(compressor)))
        steps = {name: assignment.steps for name, assignment in self.assignments.items()}
        return {"steps": steps, "memory": memory, "selection": selection}

    def _names_with(self, compressor: Compressor) -> list[str]:
        return [
            name
            for name, assignment in self.assignments.items()
            if compressor in (assignment.compressor, assignment.after_flush)
        ]

    def _zeros(self, name: str) -> Tensor:
        info = self.assignments[name].plan.info
        wide = torch.float64 if info.dtype == torch.float64 else torch.float32
        return torch.zeros(info.shape, dtype=wide, device=self.device)

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Replace all state; a residual for a parameter that is dense now is flushed, not dropped."""
        self.release()
        for name, steps in content["steps"].items():
            self.assignments[name].steps = int(steps)
        for store, contents in content["memory"].items():
            for name, values in contents.items():
                self._adopt(name, store, values)
        saved = content.get("selection", {})
        for compressor in self.compressors.values():
            mine = {name: saved[name] for name in self._names_with(compressor) if name in saved}
            compressor.load_state_dict(mine)
        self._merge_flushes()

    def check(self, content: dict[str, Any]) -> None:
        """Refuse the state of another model before anything is replaced."""
        contents = content["memory"].values()
        for name in {*content["steps"], *(name for held in contents for name in held)}:
            if name not in self.assignments:
                raise UsageError(f"state holds parameter {name!r}, which this model does not have")
        for name, values in (item for held in contents for item in held.items()):
            shape = self.assignments[name].plan.info.shape
            if tuple(values.shape) != shape:
                raise UsageError(
                    f"state of {name!r} has shape {list(values.shape)}, the parameter has {list(shape)}"
                )

    def write_memory(self, name: str, store: str, values: Tensor) -> bool:
        """Replace what a parameter's memory holds in a store; False if it has no such store."""
        memory = self.assignments[name].compressor.memory
        if memory is None or store not in memory.stores:
            return False
        memory.stores[store].write(name, values.to(self.device))
        return True

    def _adopt(self, name: str, store: str, values: Tensor) -> None:
        if not self.write_memory(name, store, values) and store == "residual" and values.any():
            assignment = self.assignments[name]
            carrier = ResidualState(Residual())
            carrier.stores["residual"].write(name, values.to(self.device))
            assignment.after_flush = assignment.compressor
            assignment.compressor = FlushCompressor(carrier)

    def _carry_over(self, name: str, old: Compressor, new: Compressor) -> bool:
        """Hand what is held over by name; False if the new memory has no place for it and it has to be flushed."""
        if old.memory is None or not any(name in s.names() for s in old.memory.stores.values()):
            return True
        if set(old.memory.stores) == {MOMENTUM}:
            # Nothing was held back that would have to be sent.
            self._hand_over(name, old, new)
            old.memory.release([name])
            return True
        if new.memory is None or not CARRIED.issuperset({*old.memory.stores, *new.memory.stores}):
            return False
        if not set(old.memory.stores) <= set(new.memory.stores):
            return False
        self._hand_over(name, old, new)
        return True

    def _hand_over(self, name: str, old: Compressor, new: Compressor) -> None:
        """Move what both memories have a store for."""
        if old.memory is None or new.memory is None:
            return
        for store in CARRIED & set(old.memory.stores) & set(new.memory.stores):
            held = old.memory.stores[store].take(name)
            if held is not None:
                new.memory.stores[store].write(name, held)

    def _merge_flushes(self) -> None:
        """One flush compressor per memory, so that its slots in a bucket travel together."""
        merged: dict[int, FlushCompressor] = {}
        for assignment in self.assignments.values():
            if isinstance(assignment.compressor, FlushCompressor):
                memory = id(assignment.compressor.memory)
                assignment.compressor = merged.setdefault(memory, assignment.compressor)
