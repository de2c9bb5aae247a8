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
from thinwire.layout import Bucket, BucketLayout
from thinwire.memory.account import Account
from thinwire.memory.base import MemoryState
from thinwire.memory.residual import Residual, ResidualState
from thinwire.methods.base import Method
from thinwire.observe.stats import Tally
from thinwire.plan.groups import Group
from thinwire.plan.policy import SlotPlan
from thinwire.wire.codec import Flags


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
    bad: list[Tensor] = field(default_factory=list)


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
    ) -> None:
        self.driver = driver
        self.tally = tally
        self.device = device
        self.deterministic = deterministic
        self.scale = scale
        self.compressors: dict[Method, Compressor] = {}
        self.assignments = {
            name: Assignment(slot_plan, self._compressor(slot_plan.method))
            for name, slot_plan in plan.items()
        }
        self.step = 0
        """Synchronising backward passes begun so far."""
        self._groups: dict[BucketLayout, list[tuple[Compressor, Group]]] = {}
        self._book = StepBook()
        self._flushes: list[FlushAccount] = []

    def _compressor(self, method: Method) -> Compressor:
        if method not in self.compressors:
            self.compressors[method] = method.compressor()
        return self.compressors[method]

    # -- one bucket -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self, bucket: Bucket) -> Future[Tensor]:
        """Start the exchange of one bucket; the future's value is `bucket.flat` holding the update."""
        try:
            program = self._open(bucket)
        except Exception as error:
            # Raised here it would leave DDP's reducer unusable; through the future it ends backward().
            failed: Future[Tensor] = Future()
            fail(failed, error)
            return failed
        return self.driver.start(program)

    def _open(self, bucket: Bucket) -> Program[Tensor]:
        names = [slot.name for slot in bucket.layout.slots]
        if not self._book.seen.isdisjoint(names):
            self.settle()
        self.step += not self._book.seen
        self._book.seen.update(names)
        groups = self._groups_of(bucket.layout)
        opened = [self._open_group(compressor, group, bucket) for compressor, group in groups]
        for assignment in (self.assignments[name] for name in names):
            assignment.steps += 1
        self._book.accounts += [o.account for o in opened if o.account is not None]
        self._flushes += [o.account for o in opened if isinstance(o.account, FlushAccount)]
        self.tally.add_bucket(bucket.layout, [g for _, g in groups], opened, self.driver.place)
        return self._finish(bucket, [group for _, group in groups], opened, self._book)

    def _open_group(self, compressor: Compressor, group: Group, bucket: Bucket) -> Opened:
        pieces = group.pieces(bucket.flat)
        flags, finite = inspect(pieces)
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
                rounding = group.rounding(outcome.update, bucket.flat)
                # A cast can overflow where the wider sum did not.
                bad = bad | ~rounding.isfinite().all()
                one.account.bank(rounding)
            if one.entries is None and outcome.header is not None:
                self.tally.add_counts(group, outcome.header.counts[self.driver.place.rank])
        bucket.flat.add_(torch.where(bad, torch.nan, 0.0).to(bucket.flat.dtype))
        book.bad.append(bad)
        return bucket.flat

    # -- between steps ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def settle(self, discard: bool = False) -> None:
        """Close the step: a bad (or discarded) one gives everything that was sent back to memory."""
        book, self._book = self._book, StepBook()
        if not book.accounts:
            return
        device = book.accounts[0].c.device
        bad = torch.tensor(discard, device=device)
        for bucket_bad in book.bad:
            bad = bad | bucket_bad
        for account in book.accounts:
            account.settle(bad)
        self._end_flushes()

    def _end_flushes(self) -> None:
        """Slots whose memory has been delivered move on to their next compressor and free it."""
        flushes, self._flushes = self._flushes, []
        for account in flushes:
            for slot, delivered in zip(
                account.group.slots, account.delivered.tolist(), strict=True
            ):
                assignment = self.assignments[slot.name]
                if delivered and assignment.after_flush is not None:
                    assert assignment.compressor.memory is not None
                    assignment.compressor.memory.release([slot.name])
                    assignment.compressor = assignment.after_flush
                    assignment.after_flush = None
                    self._drop_groups(list(self._groups))

    def switch(self, plan: dict[str, SlotPlan]) -> None:
        """Adopt a new plan. What is held back carries over to the new method or is flushed densely once."""
        self.settle()
        for name, slot_plan in plan.items():
            assignment = self.assignments[name]
            old, new = assignment.compressor, self._compressor(slot_plan.method)
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
            selection.update(compressor.state_dict())
        steps = {name: assignment.steps for name, assignment in self.assignments.items()}
        return {"step": self.step, "steps": steps, "memory": memory, "selection": selection}

    def _zeros(self, name: str) -> Tensor:
        info = self.assignments[name].plan.info
        wide = torch.float64 if info.dtype == torch.float64 else torch.float32
        return torch.zeros(info.shape, dtype=wide, device=self.device)

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Replace all state; a residual for a parameter that is dense now is flushed, not dropped."""
        self._book = StepBook()
        self.step = int(content.get("step", 0))
        for assignment in self.assignments.values():
            if assignment.compressor.memory is not None:
                assignment.compressor.memory.release([assignment.plan.info.name])
        for name, steps in content["steps"].items():
            self._known(name).steps = int(steps)
        for store, contents in content["memory"].items():
            for name, values in contents.items():
                self._adopt(name, store, values)
        for compressor in self.compressors.values():
            compressor.load_state_dict(content.get("selection", {}))
        self._merge_flushes()
        self._drop_groups(list(self._groups))

    def _known(self, name: str) -> Assignment:
        if name not in self.assignments:
            raise UsageError(f"state holds parameter {name!r}, which this model does not have")
        return self.assignments[name]

    def _adopt(self, name: str, store: str, values: Tensor) -> None:
        assignment = self._known(name)
        shape = assignment.plan.info.shape
        if tuple(values.shape) != shape:
            raise UsageError(
                f"state of {name!r} has shape {list(values.shape)}, the parameter has {list(shape)}"
            )
        memory = assignment.compressor.memory
        if memory is not None and store in memory.stores:
            memory.stores[store].write(name, values.to(self.device))
        elif bool(values.any()):
            carrier = ResidualState(Residual())
            carrier.stores["residual"].write(name, values.to(self.device))
            assignment.after_flush = assignment.compressor
            assignment.compressor = FlushCompressor(carrier)

    def _carry_over(self, name: str, old: Compressor, new: Compressor) -> bool:
        """Hand a residual in gradient units over by name; False if it has to be flushed instead."""
        if old.memory is None or not any(name in s.names() for s in old.memory.stores.values()):
            return True
        if (
            new.memory is None
            or set(old.memory.stores) != {"residual"}
            or set(new.memory.stores) != {"residual"}
        ):
            return False
        held = old.memory.stores["residual"].take(name)
        if held is not None:
            new.memory.stores["residual"].write(name, held)
        return True

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


def inspect(pieces: Sequence[Tensor]) -> tuple[Flags, list[Tensor]]:
    """(flags, the same pieces with non-finite elements replaced by 0).

    A maximum is NaN or infinite exactly if an element is, and zero exactly if the slot got no gradient.
    """
    largest = torch.stack([norm.float() for norm in torch._foreach_norm(list(pieces), torch.inf)])
    finite_slots = largest.isfinite()
    flags = Flags(non_finite=~finite_slots.all(), had_gradient=largest != 0)
    if largest.device.type == "cpu" and not bool(flags.non_finite):
        return flags, list(pieces)
    return flags, [torch.where(piece.isfinite(), piece, 0.0) for piece in pieces]
