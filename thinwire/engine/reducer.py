"""Reducer: the one door under every adapter. Buckets with this rank's local gradients in, mean updates out, in place.

An adapter hands in a bucket and gets a future of the same memory holding the mean update:

1. let small neighbours wait for each other where every bucket costs the host too much (`merging.py`);
2. settle the previous step if this bucket begins a new one, and find the bucket's plan: who compresses what, with which
   backend, in what order (`bucket_plan.py`);
3. open every group: memory, selection and encoding happen here, as soon as the bucket is ready;
4. let the exchanges of neighbouring buckets leave together (`coalescer.py`), run by the driver (`drivers.py`);
5. deliver the updates, or what a bad step delivers, to every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.compress.base import Route
from thinwire.engine.assignments import ParameterAssignments
from thinwire.engine.bucket_plan import BadDelivery, BucketPlan, is_aligned
from thinwire.engine.checksums import checked
from thinwire.engine.coalescer import BucketCoalescer
from thinwire.engine.drivers import Driver, fail
from thinwire.engine.fusing import in_rank_order
from thinwire.engine.loss_scale import no_scale, usable_scale
from thinwire.engine.merging import BucketMerger, ReadyBucket, can_join, fulfil
from thinwire.engine.named_buckets import NamedBuckets, views_of
from thinwire.engine.replicas import ReplicaWatch
from thinwire.engine.step import StepRecord
from thinwire.errors import ExchangeError, UsageError
from thinwire.exchange.requests import Program, begin_now
from thinwire.kernels.inspection import prepare_poison
from thinwire.kernels.journal import Journal
from thinwire.layout import Bucket, BucketLayout, ParameterInfo
from thinwire.memory.account import settle_all
from thinwire.methods.base import Method
from thinwire.observe.clock import Mark
from thinwire.observe.dimensions import DimensionStats, dimension_stats
from thinwire.observe.exposure import ExposureClock
from thinwire.observe.stations import ENCODE, station
from thinwire.observe.stats import Tally
from thinwire.plan.planner import Planner
from thinwire.plan.policy import Rule


class Reducer:
    """Reduces the gradients of a set of parameters by one method; every rank makes it with the same settings.

    A backward is a call of `reduce` for every bucket and, if it came to its end, one of `end_backward`. Without that the
    updates of its buckets were never used: all of them are taken back when the next one begins, or somebody reads memory.

    Args:
        parameters: What is known of every parameter, by name.
        method: How their gradients are sent.
        driver: Runs the exchanges, and says which rank this is.
        device: Where the gradients are.
        policy: Rules for single parameters; the first match wins.
        scale: Reads the loss scale of the gradients, None where there is none.
        deterministic: Add floating-point numbers of several ranks in rank order, so that bits do not depend on the
            bucketing.
        checksum: Refuse on all ranks, with a `DamageError`, what does not arrive as it was sent.
        restorable: A bad step, or one that is discarded, leaves memory as it was before it, bit for bit. That takes memory
            a second time. Without it what was sent returns to memory, and the finite part of the gradient stays there.
        when_bad: What a bad step leaves in a bucket of a layout: not-a-number everywhere, which a GradScaler skips, or
            `deliver_nothing`.
        coalesce_bytes: Buckets wait for each other until together they send so much, or for `flush`.
        replicas: Compares the parameters of all ranks, now and then or when asked.
        settings: Further settings of the caller that have to be the same on all ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, ParameterInfo],
        method: Method,
        driver: Driver,
        *,
        device: torch.device,
        policy: Sequence[Rule] = (),
        scale: Callable[[], Tensor | None] = no_scale,
        deterministic: bool = False,
        checksum: bool = False,
        restorable: bool = False,
        when_bad: Callable[[BucketLayout], BadDelivery] = prepare_poison,
        coalesce_bytes: int = 0,
        replicas: ReplicaWatch | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.driver = driver
        self.device = device
        self.tally = Tally(driver.ledger, driver.sent_bytes)
        self.exposure = ExposureClock(device, wanted=driver.network is not None)
        self.step = 0
        """Synchronising backward passes begun so far."""
        self._deterministic = deterministic
        self._settings = {
            "deterministic": str(deterministic),
            "checksum": str(checksum),
            "restorable": str(restorable),
            **(replicas.settings if replicas is not None else {}),
            **(settings or {}),
        }
        self._scale = scale
        self._prepare_bad = when_bad
        adapt: Callable[[Program], Program] | None = None
        if checksum:
            # Its sums are in rank order too.
            adapt = partial(checked, place_of=driver.place_of)
        elif deterministic:
            adapt = partial(in_rank_order, world_of=driver.world_of)
        self._coalescer = BucketCoalescer(driver, coalesce_bytes, adapt)
        nbytes = sum(info.numel * info.dtype.itemsize for info in self.parameters.values())
        self._merger = BucketMerger(driver.merge_bytes, len(self.parameters), nbytes)
        self._planner = self._plan(method, policy)
        self._journal = Journal()
        self.assignments = ParameterAssignments(
            self._planner.plan(0), device, self._journal, restorable=restorable
        )
        self.plans: dict[BucketLayout, BucketPlan] = {}
        """What was decided for every bucket layout in use."""
        self._named_buckets = NamedBuckets(self.parameters, device)
        self.record = StepRecord()
        """The step that is under way, or can still be taken back."""
        self.replicas = replicas
        if replicas is not None:
            replicas.followers.append(self.assignments)
        self.before_step: list[Callable[[int], None]] = []
        """Called with the number of a step that begins, in the thread that may use the network; they may `switch`."""
        self.on_ready: Callable[[Bucket, Mark], Callable[[], None]] | None = None
        """Called before a bucket is encoded, with the moment its gradient was there; what it returns is called when the update is."""

    @property
    def coalesce_bytes(self) -> int:
        """Bytes that a rank sends before buckets leave; less waits for other buckets, or for `flush`."""
        return self._coalescer.enough

    @coalesce_bytes.setter
    def coalesce_bytes(self, enough: int) -> None:
        self._coalescer.enough = enough

    @property
    def merge_bytes(self) -> int:
        """Bytes of gradient that buckets hold before they are encoded as one, half of it near the ends of a backward; what the
        driver says, unless it is set."""
        return self._merger.enough

    @merge_bytes.setter
    def merge_bytes(self, enough: int) -> None:
        self._merger.enough = enough

    def keep_quiet(self, backwards: int) -> None:
        """Encode and send nothing of the next so many backwards before their last gradient is there, or `flush` is called."""
        self._merger.quiet_backwards = backwards

    def _plan(self, method: Method, policy: Sequence[Rule]) -> Planner:
        """Agree on the settings first of all: a rank that raised alone would leave the others waiting."""
        settings = {"method": repr(method), "policy": "; ".join(map(str, policy)) or "none"}
        for name, info in self.parameters.items():
            settings[f"parameter {name}"] = f"{list(info.shape)} {list(info.strides)} {info.dtype}"
        self.driver.agree({**settings, **self._settings})
        return self._make_planner(method, policy)

    def _make_planner(self, method: Method, policy: Sequence[Rule]) -> Planner:
        world = self.driver.place.world
        planner = Planner(self.parameters.values(), method, policy, world)
        if len(planner.host_sizes) > 1:
            raise UsageError(
                f"per_host is {sorted(planner.host_sizes)} in one plan; it must be the same everywhere"
            )
        for per_host in planner.host_sizes:
            self.driver.add_hosts(per_host)
        return planner

    # -- one backward ------------------------------------------------------------------------------------------

    def reduce(self, bucket: Bucket, future: Future[Tensor] | None = None) -> Future[Tensor]:
        """Start the exchange of one bucket; the future's value is `bucket.flat` holding the update."""
        if self._merger.has_seen(bucket.layout):
            self.abandon()
        future = self.driver.new_future() if future is None else future
        ready = ReadyBucket(bucket, future, *self._look())
        for unit in self._merger.add(ready):
            self._hand_over(unit)
        return ready.future

    def _look(self) -> tuple[Mark | None, Mark | None]:
        """Now, on the stream of the backward: for who asks when a bucket is ready, and for the exposed time."""
        exposed = self.exposure.mark()
        return (exposed or Mark(self.device) if self.on_ready is not None else None), exposed

    def reduce_named(self, gradients: Mapping[str, Tensor]) -> Future[Tensor]:
        """The same for tensors by name, which hold the update when the future is done."""
        bucket = self._named_buckets.fill(gradients)
        views, targets = views_of(bucket), list(gradients.values())
        ready = ReadyBucket(bucket, self.driver.new_future(), *self._look())
        self._hand_over([ready], lambda: torch._foreach_copy_(targets, views))
        return ready.future

    def accompany(self, program: Program[Any], what: str) -> Future[Any]:
        """Have a small program leave with the next payload, or with `flush`; its result. `what` names it to the user."""
        future = self.driver.new_future()
        join = partial(self._coalescer.accompany, program, future, what)
        self.driver.hand_over(join, partial(fail, future))
        return future

    def flush(self) -> None:
        """What waits for other buckets leaves."""
        for unit in self._merger.take():
            self._hand_over(unit)
        self.driver.hand_over(self._coalescer.flush, lambda error: None)

    def go_on(self) -> None:
        """The next backward adds to gradients of the last one, which nobody has used: they are one step to a verdict."""

        def go_on() -> None:
            # Of a record that a switch has closed since nothing can be taken back.
            self.record.goes_on = bool(self.record.seen)

        self.driver.hand_over(go_on, lambda error: None)

    def end_backward(self) -> None:
        """The backward has ended: what waits for other buckets leaves, and what was sent counts."""
        for unit in self._merger.end():
            self._hand_over(unit)

        def end() -> None:
            self._coalescer.flush()
            self.record.ended = True

        self.driver.hand_over(end, lambda error: None)

    def abandon(self) -> None:
        """The backward has failed, if one is under way: what it sent is taken back, and what waits is dropped.

        Afterwards nobody works on its buckets any more.
        """
        for ready in chain.from_iterable(self._merger.forget()):
            fail(ready.future, ExchangeError("the backward ended before its last bucket came"))
        self.driver.catch_up()
        if not self.record.ended:
            self.end_step()

    def _hand_over(
        self, buckets: Sequence[ReadyBucket], then: Callable[[], None] | None = None
    ) -> None:
        """Have these buckets encoded together and sent; `then` is called when they hold the update."""

        def give_up(error: Exception) -> None:
            for ready in buckets:
                fail(ready.future, error)

        self.driver.hand_over(partial(self._reduce, buckets, then), give_up)

    @torch.no_grad()
    def _reduce(self, buckets: Sequence[ReadyBucket], then: Callable[[], None] | None) -> None:
        if len(buckets) > 1 and not can_join([ready.bucket for ready in buckets]):
            for ready in buckets:
                self._reduce([ready], then)
            return
        first = buckets[0]
        if not first.bucket.layout.slots:
            # All its parameters were frozen at attach: it belongs to no step, and would miscount them.
            first.future.set_result(first.bucket.flat)
            return
        bucket = first.bucket if len(buckets) == 1 else self._merger.join(buckets)
        with station(ENCODE):
            plan = self._enter(bucket)
            after = [] if then is None else [then]
            last = buckets[-1]
            if self.on_ready is not None and last.ready is not None:
                after.insert(0, self.on_ready(bucket, last.ready))
            after += self.exposure.note(self.step, last.exposed)
            if self.replicas is not None and self.replicas.is_due(self.step + 1):
                flats = [ready.bucket.flat for ready in buckets]
                after.append(partial(self.replicas.note_update, flats))
            delivery, nbytes = plan.open(bucket.flat, self.record)
            program = begin_now(fulfil(delivery, buckets, after))
        futures = [ready.future for ready in buckets]
        self._coalescer.add(program, nbytes, futures, plan.title)

    def _enter(self, bucket: Bucket) -> BucketPlan:
        """The bucket's plan, in the step that it belongs to."""
        known = self.plans.get(bucket.layout)
        names = {slot.name for slot in bucket.layout.slots} if known is None else known.names
        if self.record.settled or not self.record.seen.isdisjoint(names):
            self.end_step()
        if not self.record.seen:
            # Of a copy: who has seen enough takes itself off the list.
            for call in tuple(self.before_step):
                call(self.step)
            self._follow_schedule(self.step)
            self.step += 1
            self.tally.steps += 1
            scale = self._scale()
            if scale is not None:
                self.record.scale, self.record.unscalable = usable_scale(scale)
            if self.replicas is not None and self.replicas.is_due(self.step):
                # The comparison leaves with the step's first payload.
                look = begin_now(self.replicas.look(self.step))
                self._coalescer.add(look, 0, [], "replicas")
        self.record.seen |= names
        self.record.ended = False
        # Not before: the end of a step, and the schedule, may change who compresses what.
        return self._find_plan(bucket)

    def _find_plan(self, bucket: Bucket) -> BucketPlan:
        layout, aligned = bucket.layout, is_aligned(bucket.flat)
        plan = self.plans.get(layout)
        if plan is None or plan.aligned != aligned:
            names = {slot.name for slot in layout.slots}
            # A re-bucketing replaces every earlier layout that shares a parameter with the new one.
            self.plans = {
                old: kept for old, kept in self.plans.items() if kept.names.isdisjoint(names)
            }
            plan = self.plans[layout] = BucketPlan(
                layout,
                self.assignments.by_name,
                self.driver.place,
                deterministic=self._deterministic,
                aligned=aligned,
                when_bad=self._prepare_bad(layout),
                tally=self.tally,
            )
            self._merger.keep(self.plans)
        return plan

    # -- the verdict -------------------------------------------------------------------------------------------

    def verdict(self) -> Tensor:
        """bool []: whether the last step is bad; it is unless its backward has ended, and all its buckets."""
        if not self.record.complete:
            self.driver.catch_up()
        return self.record.verdict(self.device)

    def overrule(self, bad: Tensor) -> None:
        """Say that the last step is bad if this flag (bool []) is up, whatever its own buckets say.

        Call it before the next step begins, with a flag that is the same on all ranks.
        """
        self.record.overruled = bad

    @torch.no_grad()
    def settle(self, discard: bool = False) -> None:
        """Apply the step's verdict: after a bad (or discarded) one memory is what it was, or has back what was sent.

        Readers of memory call it, between two backwards; the step can still be discarded until the next one begins.
        """
        if not self.record.complete:
            # A bucket ended in an error, or the backward did: nobody waited for those behind it.
            self.driver.catch_up()
        record = self.record
        if not record.seen or (record.settled and not discard):
            return
        record.settled = True
        bad = torch.ones((), dtype=torch.bool, device=self.device) if discard else self.verdict()
        settle_all(record.accounts, bad)
        self._journal.restore(bad)

    def end_step(self) -> None:
        """Settle and close the step: nothing of it can be taken back any more."""
        self.settle()
        self._coalescer.abandon()
        record, self.record = self.record, StepRecord()
        if record.goes_on:
            self._journal.extend()
        else:
            self._journal.clear()
        if self.assignments.end_flushes(record):
            self.plans.clear()

    # -- between steps -----------------------------------------------------------------------------------------

    def switch(self, method: Method, policy: Sequence[Rule] = ()) -> None:
        """Use another method from the next bucket on; what is held back carries over or is flushed densely once."""
        self._use(self._plan(method, policy))

    def follow(self, method: Method, policy: Sequence[Rule] = ()) -> None:
        """The same for a method that all ranks know to be the same, without asking them."""
        self._use(self._make_planner(method, policy))

    def _use(self, planner: Planner) -> None:
        plan = planner.plan(self.step)
        self._planner = planner
        self._adopt(plan)

    def _follow_schedule(self, step: int) -> None:
        plan = self._planner.change(step)
        if plan is not None:
            self._adopt(plan)

    def _adopt(self, plan: dict[str, Any]) -> None:
        self.end_step()
        self.assignments.switch(plan)
        self.plans.clear()

    def release(self) -> None:
        """Drop all that is held back."""
        self._journal.clear()
        self.record = StepRecord()
        self.assignments.release()

    def close(self) -> None:
        """Finish what was started and free the memories."""
        self.end_step()
        self.release()
        self.plans.clear()
        self.driver.close()

    def dimensions(self) -> dict[str, DimensionStats]:
        """Which rows the last step left out, for the parameters a sparse method has."""
        found: dict[str, DimensionStats] = {}
        for group, account in zip(self.record.groups, self.record.accounts, strict=True):
            assignments = [self.assignments.by_name[slot.name] for slot in group.slots]
            methods = {one.plan.info.name: one.plan.method for one in assignments}
            selected = all(one.plan.method.selects and not one.flushing for one in assignments)
            # A narrow memory that rests no longer holds what was compensated.
            if selected and account.c.numel():
                found |= dimension_stats(self.step, group, account, methods)
        return found

    @property
    def routes(self) -> list[Route]:
        """How all groups of the last step travelled; none before the first step."""
        return [route for plan in self.plans.values() for route in plan.routes]

    # -- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, **self.assignments.state_dict()}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Replace all state, or refuse it before anything is replaced."""
        self.assignments.check(content)
        self.release()
        self.step = int(content.get("step", 0))
        # The plan of the last step that was taken: its memories are what was saved.
        self._follow_schedule(max(0, self.step - 1))
        self.assignments.load_state_dict(content)
        self.plans.clear()
