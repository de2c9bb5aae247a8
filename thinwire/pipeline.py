"""Pipeline: what happens to one bucket between backward and step.

The only place that knows all stations. An adapter hands in a bucket holding this rank's local gradient and gets a
future of the same buffer holding the mean update:

1. settle the previous step if this bucket begins a new one;
2. look at the gradient: is it finite, did each slot get one at all;
3. open every group of the bucket with its compressor (memory, selection, encoding happen here);
4. run the groups' exchanges side by side, sums of one round in one buffer;
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
    BucketStep,
    Compressor,
    FlushAccount,
    GroupStep,
    Opened,
    SparseCompressor,
)
from thinwire.convoy import Convoy
from thinwire.dense_compressor import DenseCompressor
from thinwire.exchange.base import Outcome
from thinwire.exchange.drivers import Driver, fail
from thinwire.exchange.fused import fuse_requests
from thinwire.exchange.requests import Program, together
from thinwire.fused import FusedAccount
from thinwire.kernels.inspection import any_of, inspect, is_any_non_finite, prepare_poison
from thinwire.layout import Bucket, BucketLayout
from thinwire.memory.account import Account, settle_all
from thinwire.methods.base import SparseMethod
from thinwire.observe.dimensions import DimensionStats, dimension_stats
from thinwire.observe.stations import ENCODE, station
from thinwire.observe.stats import Tally
from thinwire.plan.groups import Group
from thinwire.plan.policy import SlotPlan
from thinwire.roster import Assignment, Roster


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


@dataclass(frozen=True, eq=False)
class Route:
    """What is the same in every step of one bucket layout."""

    names: frozenset[str]
    assignments: Sequence[Assignment]
    """Of all its parameters."""
    compressors: Sequence[Compressor]
    groups: Sequence[Group]
    """One per compressor, dense first."""
    members: Sequence[Sequence[Assignment]]
    """The assignments of each group."""
    beside: Group | None
    """The dense one of two groups, if the other's kernels may carry it along."""
    poison: Callable[[Tensor, Tensor], None]


class Pipeline:
    """The way of every bucket of one handle; who compresses what is in `roster`."""

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
        worth_sending: int = 0,
    ) -> None:
        self.driver = driver
        self.convoy = Convoy(driver, worth_sending)
        """Buckets leave as soon as together they have `worth_sending` bytes; an adapter that sets it says when the last has come."""
        self.replan = replan
        """The plan of a step where it differs from the one in force."""
        self.tally = tally
        self.device = device
        self.deterministic = deterministic
        self.scale = scale
        self.roster = Roster(plan, device)
        self.step = 0
        """Synchronising backward passes begun so far."""
        self._groups: dict[BucketLayout, list[tuple[Compressor, Group]]] = {}
        self._routes: dict[BucketLayout, Route] = {}
        self._book = StepBook()

    # -- one bucket -------------------------------------------------------------------------------------------

    def reduce(self, bucket: Bucket, *, last: bool = False) -> Future[Tensor]:
        """Start the exchange of one bucket; the future's value is `bucket.flat` holding the update.

        With the `last` bucket of a step everything that waits for company leaves.
        """
        future = self.driver.new_future()
        self.driver.hand_over(lambda queue_up: self._reduce(bucket, future, last, queue_up))
        return future

    @torch.no_grad()
    def leave(self) -> None:
        """The last bucket of the step will not come: what waits for company leaves."""
        self.driver.hand_over(lambda queue_up: self.convoy.leave())

    @torch.no_grad()
    def _reduce(
        self,
        bucket: Bucket,
        future: Future[Tensor],
        last: bool,
        queue_up: Callable[[], None],
    ) -> None:
        try:
            queue_up()
            if bucket.layout.slots:
                with station(ENCODE):
                    program, nbytes = self._open(bucket)
                self.convoy.add(program, nbytes, future)
            else:
                # All its parameters were frozen at attach: it belongs to no step, and would miscount them.
                future.set_result(bucket.flat)
        except Exception as error:
            # Raised here it would leave DDP's reducer unusable; through the future it ends backward().
            fail(future, error)
        if last:
            self.convoy.leave()

    def _open(self, bucket: Bucket) -> tuple[Program[Tensor], float]:
        """(what is left to do, bytes this rank sends in it)."""
        book, layout = self._book, bucket.layout
        known = self._routes.get(layout)
        names = [slot.name for slot in layout.slots] if known is None else known.names
        if book.settled or not book.seen.isdisjoint(names):
            self.end_step()
        if not self._book.seen:
            self._follow_schedule(self.step)
            self.step += 1
            self.tally.steps += 1
        # The end of a step, and the schedule, may have changed who compresses what.
        book, route = self._book, self._route(layout)
        book.seen.update(route.names)
        book.buckets += 1
        opened = self._open_groups(route, bucket, book)
        for assignment in route.assignments:
            assignment.steps += 1
        self.tally.add_bucket(layout, route.groups, opened, self.driver.place)
        nbytes = sum(one.nbytes for one in opened)
        return self._finish(bucket, route, opened, book), nbytes

    def _open_groups(self, route: Route, bucket: Bucket, book: StepBook) -> list[Opened]:
        """Dense ones, which come first, are opened last: they may travel with what the others gather."""
        opened: list[Opened] = []
        scale, company = self.scale(), 0.0
        carrier: Opened | None = None
        for which in reversed(range(len(route.groups))):
            step = BucketStep(
                group=route.groups[which],
                bucket_flat=bucket.flat,
                steps=[assignment.steps for assignment in route.members[which]],
                scale=scale,
                place=self.driver.place,
                deterministic=self.deterministic,
                company=company / max(1, self.driver.place.world - 1),
                beside=route.beside,
                carrier=carrier,
            )
            one = self._open_group(route.compressors[which], step)
            opened.insert(0, one)
            # At once: if another group cannot be opened, what this one took out of memory has to return.
            if one.account is not None:
                book.accounts.append(one.account)
                book.groups.append(step.group)
            if one.gathered:
                company += one.nbytes
            if one.carries is not None:
                carrier = one
        return opened

    def _open_group(self, compressor: Compressor, raw: BucketStep) -> Opened:
        fused = compressor.open_fused(raw)
        if fused is not None:
            return fused
        flags, finite = inspect(raw.group, raw.bucket_flat)
        step = GroupStep(
            raw.group, finite, flags, raw.steps, raw.scale, raw.place, raw.deterministic
        )
        return compressor.open(step)

    def _finish(
        self, bucket: Bucket, route: Route, opened: Sequence[Opened], book: StepBook
    ) -> Program[Tensor]:
        side_by_side = together([o.program for o in opened])
        outcomes: list[Outcome] = yield from fuse_requests(side_by_side)
        verdicts: list[Tensor] = []
        for group, one, outcome in zip(route.groups, opened, outcomes, strict=True):
            if one.complete is not None:
                outcome = one.complete(outcome)
            # A group that was carried along has its carrier's flag.
            if not any(outcome.non_finite is other for other in verdicts):
                verdicts.append(outcome.non_finite)
            if not outcome.delivered:
                group.deliver(outcome.update, bucket.flat)
                if one.account is not None and bucket.flat.dtype != outcome.update.dtype:
                    one.account.bank(group.rounding(outcome.update, bucket.flat))
                # The sum of finite gradients, or its cast to a narrower dtype, can overflow.
                verdicts.append(is_any_non_finite(group, outcome.update, bucket.flat))
            if one.entries is None and outcome.sent is not None:
                self.tally.add_counts(group, outcome.sent)
            elif one.entries is None and outcome.header is not None:
                self.tally.add_counts(group, outcome.header.counts[self.driver.place.rank])
        bad = any_of(verdicts)
        route.poison(bucket.flat, bad)
        book.bad.append(bad)
        return bucket.flat

    # -- between steps ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def settle(self, discard: bool = False) -> None:
        """Apply the step's verdict: a bad (or discarded) one gives everything that was sent back to memory.

        Readers of memory call it; the step can still be discarded until the next one begins.
        """
        if len(self._book.bad) < self._book.buckets:
            # One bucket ended in an error, and nobody waited for those behind it.
            self.driver.catch_up()
        book = self._book
        if not book.seen or (book.settled and not discard):
            return
        book.settled = True
        # A bucket without a verdict ended in an error, so its update was never used.
        if discard or len(book.bad) < book.buckets:
            bad = torch.ones((), dtype=torch.bool, device=self.device)
        else:
            bad = any_of(book.bad)
        settle_all(book.accounts, bad)

    def dimensions(self) -> dict[str, DimensionStats]:
        """Which rows the last step left out, for the parameters a sparse method has."""
        found: dict[str, DimensionStats] = {}
        for group, account in zip(self._book.groups, self._book.accounts, strict=True):
            methods = {
                slot.name: self.roster.assignments[slot.name].plan.method for slot in group.slots
            }
            # A narrow memory that rests no longer holds what was compensated.
            if (
                type(account) in (Account, FusedAccount)
                and account.c.numel()
                and all(isinstance(m, SparseMethod) for m in methods.values())
            ):
                found |= dimension_stats(self.step, group, account, methods)
        return found

    def end_step(self) -> None:
        """Settle and close the step: nothing of it can be taken back any more."""
        self.settle()
        self.convoy.abandon()
        book, self._book = self._book, StepBook()
        if self.roster.end_flushes([a for a in book.accounts if isinstance(a, FlushAccount)]):
            self._drop_groups(list(self._groups))

    def switch(self, plan: dict[str, SlotPlan]) -> None:
        """Adopt a new plan from the next bucket on."""
        self.end_step()
        self.roster.switch(plan)
        self._drop_groups(list(self._groups))

    def release(self) -> None:
        """Drop all that is held back."""
        self._book = StepBook()
        self.roster.release()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, **self.roster.state_dict()}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Replace all state, or refuse it before anything is replaced."""
        self.roster.check(content)
        self.release()
        self.step = int(content.get("step", 0))
        # The plan of the last step that was taken: its memories are what was saved.
        self._follow_schedule(max(0, self.step - 1))
        self.roster.load_state_dict(content)
        self._drop_groups(list(self._groups))

    def _follow_schedule(self, step: int) -> None:
        plan = self.replan(step)
        if plan is not None:
            self.switch(plan)

    def _route(self, layout: BucketLayout) -> Route:
        if layout not in self._routes:
            groups = self._groups_of(layout)
            assignments = self.roster.assignments
            first, dense = groups[0] if len(groups) == 2 else (None, None)
            carried = (
                dense is not None
                and first is not None
                and first.can_be_carried(dense, layout.dtype)
            )
            self._routes[layout] = Route(
                names=frozenset(slot.name for slot in layout.slots),
                assignments=[assignments[slot.name] for slot in layout.slots],
                compressors=[compressor for compressor, _ in groups],
                groups=[group for _, group in groups],
                members=[[assignments[slot.name] for slot in group.slots] for _, group in groups],
                beside=dense if carried else None,
                poison=prepare_poison(layout),
            )
        return self._routes[layout]

    def _groups_of(self, layout: BucketLayout) -> list[tuple[Compressor, Group]]:
        """Cut a bucket into one group per compressor, dense first: it needs no encoding and can leave at once."""
        if layout not in self._groups:
            members: dict[Compressor, list] = {}
            for slot in layout.slots:
                if slot.numel:
                    members.setdefault(self.roster.assignments[slot.name].compressor, []).append(
                        slot
                    )
            wide = torch.float64 if layout.dtype == torch.float64 else torch.float32
            order = sorted(members, key=lambda compressor: not compressor.travels_whole)
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
            self._routes.pop(layout, None)
            for compressor, group in self._groups.pop(layout):
                if isinstance(compressor, SparseCompressor):
                    compressor.forget_group(group)
