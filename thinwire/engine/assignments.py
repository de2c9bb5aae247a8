"""ParameterAssignments: which compressor each parameter is with, and how it moves from one to the next without losing anything.

Everything here happens between steps: switching to another plan, flushing what a parameter that turns dense still holds,
saving and loading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.compress.base import Compressor
from thinwire.compress.flush import FlushCompressor
from thinwire.engine.step import StepRecord
from thinwire.errors import UsageError
from thinwire.kernels.journal import Journal
from thinwire.layout import wide_dtype
from thinwire.memory.adam import SECOND_MOMENT
from thinwire.memory.base import MemoryState, Stores
from thinwire.memory.residual import Residual, ResidualState
from thinwire.methods.base import Method
from thinwire.plan.policy import SlotPlan

# Stores that mean the same in every memory that has them.
MOMENTUM = "momentum"
CARRIED = {"residual", MOMENTUM, SECOND_MOMENT}
HELD, FLUSHED = "held", "flushed"


@dataclass
class Assignment:
    """Which compressor a parameter is with, how often it was exchanged, and where it goes after a flush."""

    plan: SlotPlan
    compressor: Compressor
    exchanges: int = 0
    after_flush: Compressor | None = None

    @property
    def flushing(self) -> bool:
        """Whether what is held back is sent once before the next method begins."""
        return self.after_flush is not None

    def stop_flush(self) -> None:
        """Be with the next method at once, if something is being flushed."""
        if self.after_flush is not None:
            self.compressor, self.after_flush = self.after_flush, None


def holds(memory: Stores | None, name: str) -> bool:
    """Whether a memory holds anything of a parameter."""
    return memory is not None and any(name in store.names() for store in memory.stores.values())


class ParameterAssignments:
    """All parameters of one handle by name; the methods they are assigned to share one compressor each."""

    def __init__(
        self,
        plan: dict[str, SlotPlan],
        device: torch.device,
        journal: Journal,
        *,
        restorable: bool = False,
    ) -> None:
        """What steps change is noted in the `journal`: all of it if memory is to be `restorable`, else what has to be."""
        self.device = device
        self.restorable = restorable
        self._journal = journal
        self.compressors: dict[Method, Compressor] = {}
        self.by_name = {
            name: Assignment(slot_plan, self._compressor(slot_plan))
            for name, slot_plan in plan.items()
        }

    def _compressor(self, slot_plan: SlotPlan) -> Compressor:
        method = slot_plan.method
        if method not in self.compressors:
            made = self.compressors[method] = method.compressor()
            if self.restorable or (made.memory is not None and made.memory.needs_journal):
                made.keep_journal(self._journal)
        self.compressors[method].expect(slot_plan.info, self.device)
        return self.compressors[method]

    # -- moving ------------------------------------------------------------------------------------------------

    def switch(self, plan: dict[str, SlotPlan]) -> None:
        """Adopt a new plan. What is held back carries over to the new method or is flushed densely once."""
        for name, slot_plan in plan.items():
            assignment = self.by_name[name]
            old, new = assignment.compressor, self._compressor(slot_plan)
            assignment.plan = slot_plan
            if assignment.flushing:
                assignment.after_flush = new
            elif old is not new and not self._carry_over(name, old, new):
                assert isinstance(old.memory, MemoryState), "nothing else holds anything back"
                assignment.compressor = FlushCompressor(old.memory)
                assignment.after_flush = new
            else:
                assignment.compressor = new
        self._merge_flushes()
        in_use = {id(a.compressor) for a in self.by_name.values()}
        in_use |= {id(a.after_flush) for a in self.by_name.values()}
        self.compressors = {m: c for m, c in self.compressors.items() if id(c) in in_use}

    def end_flushes(self, record: StepRecord) -> bool:
        """Slots whose memory has been delivered move on to their next compressor and free it; whether any did.

        Whether a flush was delivered decides what is sent next, so the host has to know: the step after a slot turned
        dense is the one place where it waits for the device.
        """
        moved = False
        for account, group in zip(record.accounts, record.groups, strict=True):
            flushed = [] if account.flushed is None else account.flushed.tolist()
            for slot, done in zip(group.slots, flushed, strict=False):
                assignment = self.by_name[slot.name]
                if done and assignment.after_flush is not None:
                    assert assignment.compressor.memory is not None
                    self._hand_over(slot.name, assignment.compressor, assignment.after_flush)
                    assignment.compressor.memory.release([slot.name])
                    assignment.compressor = assignment.after_flush
                    assignment.after_flush = None
                    moved = True
        return moved

    @property
    def hold_nothing_back(self) -> bool:
        """Whether nothing waits to be sent: all parameters travel whole and none is being flushed."""
        return all(
            one.compressor.travels_whole and not one.flushing for one in self.by_name.values()
        )

    def stop_flushes(self) -> None:
        """What is held back is about to be replaced: whoever flushes it is with its next method at once."""
        for assignment in self.by_name.values():
            assignment.stop_flush()

    def release(self) -> None:
        """Drop all that is held back."""
        for assignment in self.by_name.values():
            if assignment.compressor.memory is not None:
                assignment.compressor.memory.release([assignment.plan.info.name])

    # -- state ------------------------------------------------------------------------------------------------

    def memories(self) -> list[Stores]:
        """Every memory in use, each once."""
        found: dict[int, Stores] = {}
        for assignment in self.by_name.values():
            if assignment.compressor.memory is not None:
                found[id(assignment.compressor.memory)] = assignment.compressor.memory
        return list(found.values())

    def memory_bytes(self) -> tuple[int, int]:
        """(what all parameters' memory takes, what is kept of the step before) once every parameter had a gradient."""
        held = spare = 0
        for assignment in self.by_name.values():
            memory = assignment.compressor.memory
            for store in memory.stores.values() if memory is not None else ():
                info = assignment.plan.info
                nbytes = store.resting_bytes(info.numel, info.dtype)
                held += nbytes
                spare += nbytes if store.journal is not None else 0
        return held, spare

    def held(self, name: str, store: str) -> Tensor | None:
        """What a memory holds of a parameter, in its shape and in plain gradient units."""
        memory = self.by_name[name].compressor.memory
        return (
            memory.stores[store].read(name)
            if memory is not None and store in memory.stores
            else None
        )

    def state_dict(self) -> dict[str, Any]:
        memory: dict[str, dict[str, Tensor]] = {}
        selection: dict[str, Any] = {}
        for name, assignment in self.by_name.items():
            stores = assignment.compressor.memory.stores if assignment.compressor.memory else {}
            for store, contents in stores.items():
                held = contents.read(name)
                # Zeros where nothing is held yet: a distributed load fills the tensors it finds here.
                memory.setdefault(store, {})[name] = held if held is not None else self._zeros(name)
        for compressor in self.compressors.values():
            selection.update(compressor.state_dict(self._names_with(compressor)))
        steps = {name: assignment.exchanges for name, assignment in self.by_name.items()}
        shards = self._shards()
        state = {"steps": steps, "memory": memory, "selection": selection}
        return {**state, "shards": shards} if shards else state

    def _shards(self) -> dict[str, str]:
        """Which part of each sharded parameter this rank has; as text, which every kind of checkpoint takes."""
        shards = {name: one.plan.info.shard for name, one in self.by_name.items()}
        return {
            name: f"{'x'.join(map(str, shard.full_shape))} dim {shard.dim} from {shard.offset}"
            for name, shard in shards.items()
            if shard is not None
        }

    def _names_with(self, compressor: Compressor) -> list[str]:
        return [
            name
            for name, assignment in self.by_name.items()
            if compressor in (assignment.compressor, assignment.after_flush)
        ]

    def _zeros(self, name: str) -> Tensor:
        info = self.by_name[name].plan.info
        return torch.zeros(info.shape, dtype=wide_dtype(info.dtype), device=self.device)

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Replace all state; a residual for a parameter that is dense now is flushed, not dropped."""
        self.release()
        for name, steps in content["steps"].items():
            self.by_name[name].exchanges = int(steps)
        for store, contents in content["memory"].items():
            for name, values in contents.items():
                self._adopt(name, store, values)
        for name, assignment in self.by_name.items():
            # Of a flush that was under way: of this state there is nothing to be sent.
            if not holds(assignment.compressor.memory, name):
                assignment.stop_flush()
        saved = content.get("selection", {})
        for compressor in self.compressors.values():
            mine = {name: saved[name] for name in self._names_with(compressor) if name in saved}
            compressor.load_state_dict(mine)
        self._merge_flushes()

    def check(self, content: dict[str, Any]) -> None:
        """Refuse the state of another model before anything is replaced."""
        contents = content["memory"].values()
        for name in {*content["steps"], *(name for held in contents for name in held)}:
            if name not in self.by_name:
                raise UsageError(f"state holds parameter {name!r}, which this model does not have")
        for name, values in (item for held in contents for item in held.items()):
            shape = self.by_name[name].plan.info.shape
            if tuple(values.shape) != shape:
                raise UsageError(
                    f"state of {name!r} has shape {list(values.shape)}, the parameter has {list(shape)}"
                )
        own = self._shards()
        for name, shard in content.get("shards", {}).items():
            if own.get(name, "whole") != shard:
                raise UsageError(
                    f"state of {name!r} is of the shard {shard}, this rank has {own.get(name, 'all of it')}"
                )

    def shared_state(self) -> dict[str, Tensor]:
        """Copies of what methods keep alike on all ranks, by parameter and kind."""
        return {
            f"{name} {kind}": values
            for name, assignment in self.by_name.items()
            for kind, values in assignment.compressor.shared_state(name).items()
        }

    def load_shared_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace what `shared_state` returned."""
        for name, assignment in self.by_name.items():
            head = f"{name} "
            own = {key.removeprefix(head): state[key] for key in state if key.startswith(head)}
            assignment.compressor.load_shared_state(name, own)

    def write_memory(self, name: str, store: str, values: Tensor) -> bool:
        """Replace what a parameter's memory holds in a store; False if it has no such store."""
        memory = self.by_name[name].compressor.memory
        if memory is None or store not in memory.stores:
            return False
        memory.stores[store].write(name, values.to(self.device))
        return True

    def _adopt(self, name: str, store: str, values: Tensor) -> None:
        if not self.write_memory(name, store, values) and store == "residual":
            # Also where this rank's is zero: the others' may not be, and all ranks have to send alike.
            self._flush(name, values)

    def _flush(self, name: str, values: Tensor) -> None:
        """Have this be sent of a parameter whose method has no place for it."""
        assignment = self.by_name[name]
        carrier = ResidualState(Residual())
        carrier.stores["residual"].write(name, values.to(self.device))
        assignment.after_flush = assignment.compressor
        assignment.compressor = FlushCompressor(carrier)
        if self.restorable:
            assignment.compressor.keep_journal(self._journal)

    def held_by(self) -> dict[str, list[str]]:
        """The parameters of which anything is held back, and those that are being flushed: what a switch sends follows from it."""
        items = self.by_name.items()
        return {
            HELD: [name for name, one in items if holds(one.compressor.memory, name)],
            FLUSHED: [name for name, one in items if one.flushing],
        }

    def hold_alike(self, others: Sequence[Mapping[str, Sequence[str]]]) -> None:
        """Hold zeros back of what any of the `others` holds something of, and flush them where one of them does."""
        for name in sorted({name for one in others for name in one[FLUSHED]}):
            if not self.by_name[name].flushing:
                self._flush(name, self._zeros(name))
        for name in sorted({name for one in others for name in one[HELD]}):
            if not holds(self.by_name[name].compressor.memory, name):
                self.write_memory(name, "residual", self._zeros(name))

    def _carry_over(self, name: str, old: Compressor, new: Compressor) -> bool:
        """Hand what is held over by name; False if the new memory has no place for it and it has to be flushed."""
        if old.memory is None or not holds(old.memory, name):
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
        merged: dict[int, Compressor] = {}
        for assignment in self.by_name.values():
            if assignment.flushing:
                memory = id(assignment.compressor.memory)
                assignment.compressor = merged.setdefault(memory, assignment.compressor)
