"""Pipeline: what happens to one bucket between backward and step.

The only place that knows all stations. An adapter hands in a bucket holding this rank's local gradient and gets a
future of the same buffer holding the mean update:

1. settle the previous step if this bucket begins a new one;
2. look at the gradient: is it finite, did each slot get one at all;
3. open every group of the bucket with its compressor (memory, selection, encoding happen here);
4. run the groups' exchanges side by side;
5. deliver the updates, or NaN to every rank if the step is bad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.compressor import (
    Compressor,
    DenseCompressor,
    FlushAccount,
    FlushCompressor,
    GroupStep,
    Opened,
    SparseCompressor,
)
from thinwire.errors import UsageError
from thinwire.exchange.base import Outcome
from thinwire.exchange.drivers import Driver, fail
from thinwire.exchange.requests import Program, together
from thinwire.kernels.inspection import inspect, is_finite
from thinwire.layout import Bucket, BucketLayout
from thinwire.memory.account import Account
from thinwire.memory.base import MemoryState
from thinwire.memory.residual import Residual, ResidualState
from thinwire.methods.base import Method, SparseMethod
from thinwire.observe.dimensions import DimensionStats, dimension_stats
from thinwire.observe.stations import ENCODE, station
from thinwire.observe.stats import Tally
from thinwire.plan.groups import Group
from thinwire.plan.policy import SlotPlan

# Stores that mean the same in every memory that has them.
CARRIED = {"residual", "momentum"}


@dataclass
class Assignment:
    """Which compressor a parameter is with, how often it was exchanged, and where it goes after a flush."""

    plan: SlotPlan
    compressor: Compressor
    steps: int = 0
    after_flush: Compressor | None = None


@dataclass
class StepBook:
    """What the current step has done so far and may have to take back."""

    seen: set[str] = field(default_factory=set)
    accounts: list[Account] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    """The group of each account."""
    buckets: int = 0
    bad: list[Tensor] = field(default_factory=list)
    """One verdict per bucket that came to its end."""
    settled: bool = False
    """Whether the verdict has been applied; the next bucket then begins a new step."""


class Pipeline:
    """All parameters of one handle, assigned to compressors by a plan."""

    def __init__(
        self,
        plan: dict[str, SlotPlan],
        driver: Driver,
        tally: Tally,
        *,
        device: torch.device,
        deterministic: bool,
        scale: Callable[[], Tensor | None],
        replan: Callable[[int], dict[str, SlotPlan] | None] = lambda step: None,
    ) -> None:
        self.driver = driver
        self.replan = replan
        """The plan of a step where it differs from the one in force."""
        self.tally = tally
        self.device = device
        self.deterministic = deterministic
        self.scale = scale
        self.compressors: dict[Method, Compressor] = {}
        self.assignments = {
            name: Assignment(slot_plan, self._compressor(slot_plan))
            for name, slot_plan in plan.items()
        }
        self.step = 0
        """Synchronising backward passes begun so far."""
        self._groups: dict[BucketLayout, list[tuple[Compressor, Group]]] = {}
        self._book = StepBook()

    def _compressor(self, slot_plan: SlotPlan) -> Compressor:
        method = slot_plan.method
        if method not in self.compressors:
            self.compressors[method] = method.compressor()
        self.compressors[method].expect(slot_plan.info, self.device)
        return self.compressors[method]

    # -- one bucket -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self, bucket: Bucket) -> Future[Tensor]:
        """Start the exchange of one bucket; the future's value is `bucket.flat` holding the update."""
        try:
            with station(ENCODE):
                program = self._open(bucket)
        except Exception as error:
            # Raised here it would leave DDP's reducer unusable; through the future it ends backward().
            failed: Future[Tensor] = Future()
            fail(failed, error)
            return failed
        return self.driver.start(program)

    def _open(self, bucket: Bucket) -> Program[Tensor]:
        names = [slot.name for slot in bucket.layout.slots]
        if self._book.settled or not self._book.seen.isdisjoint(names):
            self.end_step()
        if not self._book.seen:
            self._follow_schedule(self.step)
        self.step += not self._book.seen
        self._book.seen.update(names)
        self._book.buckets += 1
        groups = self._groups_of(bucket.layout)
        opened = [self._open_group(compressor, group, bucket) for compressor, group in groups]
        for assignment in (self.assignments[name] for name in names):
            assignment.steps += 1
        for (_, group), one in zip(groups, opened, strict=True):
            if one.account is not None:
                self._book.accounts.append(one.account)
                self._book.groups.append(group)
        self.tally.add_bucket(bucket.layout, [g for _, g in groups], opened, self.driver.place)
        return self._finish(bucket, [group for _, group in groups], opened, self._book)

    def _open_group(self, compressor: Compressor, group: Group, bucket: Bucket) -> Opened:
        flags, finite = inspect(group, bucket.flat)
        return compressor.open(
            GroupStep(
                group=group,
                gradients=finite,
                flags=flags,
                steps=[self.assignments[slot.name].steps for slot in group.slots],
                scale=self.scale(),
                place=self.driver.place,
                deterministic=self.deterministic,
            )
        )

    def _finish(
        self, bucket: Bucket, groups: Sequence[Group], opened: Sequence[Opened], book: StepBook
    ) -> Program[Tensor]:
        outcomes: list[Outcome] = yield from together([o.program for o in opened])
        bad = torch.zeros((), dtype=torch.bool, device=bucket.flat.device)
        for group, one, outcome in zip(groups, opened, outcomes, strict=True):
            group.deliver(outcome.update, bucket.flat)
            bad = bad | outcome.non_finite
            if one.account is not None and bucket.flat.dtype != outcome.update.dtype:
                one.account.bank(group.rounding(outcome.update, bucket.flat))
            if one.entries is None and outcome.sent is not None:
                self.tally.add_counts(group, outcome.sent)
            elif one.entries is None and outcome.header is not None:
                self.tally.add_counts(group, outcome.header.counts[self.driver.place.rank])
        # The sum of finite gradients, or its cast to a narrower dtype, can overflow.
        bad = bad | ~is_finite(bucket.flat)
        bucket.flat.add_(torch.where(bad, torch.nan, 0.0).to(bucket.flat.dtype))
        book.bad.append(bad)
        return bucket.flat

    # -- between steps ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def settle(self, discard: bool = False) -> None:
        """Apply the step's verdict: a bad (or discarded) one gives everything that was sent back to memory.

        Readers of memory call it; the step can still be discarded until the next one begins.
        """
        book = self._book
        if not book.seen or (book.settled and not discard):
            return
        book.settled = True
        # A bucket without a verdict ended in an error, so its update was never used.
        bad = torch.full((), discard or len(book.bad) < book.buckets, device=self.device)
        for bucket_bad in book.bad:
            bad = bad | bucket_bad
        for account in book.accounts:
            account.settle(bad)

    def dimensions(self) -> dict[str, DimensionStats]:
        """Which rows the last step left out, for the parameters a sparse method has."""
        found: dict[str, DimensionStats] = {}
        for group, account in zip(self._book.groups, self._book.accounts, strict=True):
            methods = {slot.name: self.assignments[slot.name].plan.method for slot in group.slots}
            if type(account) is Account and all(
                isinstance(m, SparseMethod) for m in methods.values()
            ):
                found |= dimension_stats(self.step, group, account, methods)
        return found

    def end_step(self) -> None:
        """Settle and close the step: nothing of it can be taken back any more."""
        self.settle()
        book, self._book = self._book, StepBook()
        self._end_flushes([a for a in book.accounts if isinstance(a, FlushAccount)])

    def release(self) -> None:
        """Drop all that is held back."""
        self._book = StepBook()
        for assignment in self.assignments.values():
            if assignment.compressor.memory is not None:
                assignment.compressor.memory.release([assignment.plan.info.name])

    def _end_flushes(self, flushes: Sequence[FlushAccount]) -> None:
        """Slots whose memory has been delivered move on to their next compressor and free it."""
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
                    self._drop_groups(list(self._groups))

    def _follow_schedule(self, step: int) -> None:
        plan = self.replan(step)
        if plan is not None:
            self.switch(plan)

    def switch(self, plan: dict[str, SlotPlan]) -> None:
        """Adopt a new plan. What is held back carries over to the new method or is flushed densely once."""
        self.end_step()
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
        self._drop_groups(list(self._groups))
        in_use = {id(a.compressor) for a in self.assignments.values()}
        in_use |= {id(a.after_flush) for a in self.assignments.values()}
        self.compressors = {m: c for m, c in self.compressors.items() if id(c) in in_use}

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
        return {"step": self.step, "steps": steps, "memory": memory, "selection": selection}

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
        self._check(content)
        self.release()
        self.step = int(content.get("step", 0))
        # The plan of the last step that was taken: its memories are what was saved.
        self._follow_schedule(max(0, self.step - 1))
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
        self._drop_groups(list(self._groups))

    def _check(self, content: dict[str, Any]) -> None:
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

    def _groups_of(self, layout: BucketLayout) -> list[tuple[Compressor, Group]]:
        """Cut a bucket into one group per compressor, dense first: it needs no encoding and can leave at once."""
        if layout not in self._groups:
            members: dict[Compressor, list] = {}
            for slot in layout.slots:
                if slot.numel:
                    members.setdefault(self.assignments[slot.name].compressor, []).append(slot)
            wide = torch.float64 if layout.dtype == torch.float64 else torch.float32
            order = sorted(members, key=lambda c: not isinstance(c, DenseCompressor))
            self._forget_overlapping(layout)
            self._groups[layout] = [
                (
                    c,
                    Group.of(
                        layout, members[c], layout.dtype if isinstance(c, DenseCompressor) else wide
                    ),
                )
                for c in order
            ]
        return self._groups[layout]

    def _forget_overlapping(self, layout: BucketLayout) -> None:
        """A re-bucketing replaces every earlier layout that shares a parameter with the new one."""
        names = {slot.name for slot in layout.slots}
        self._drop_groups([old for old in self._groups if names & {s.name for s in old.slots}])

    def _drop_groups(self, layouts: Sequence[BucketLayout]) -> None:
        for layout in layouts:
            for compressor, group in self._groups.pop(layout):
                if isinstance(compressor, SparseCompressor):
                    compressor.forget_group(group)
