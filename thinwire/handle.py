"""Handle: what the user holds of an attached model, the same for every adapter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.auto.prospect import Prospect
from thinwire.auto.steering import Steering
from thinwire.engine import checkpoint
from thinwire.engine.bucket_plan import backends_of
from thinwire.engine.moving import FindGroup, move, share_progress, take_group
from thinwire.engine.opaque import opaque
from thinwire.engine.reducer import Reducer
from thinwire.engine.repair import Follower
from thinwire.engine.watching import check_replicas
from thinwire.errors import UsageError
from thinwire.layout import Shard
from thinwire.methods.base import Method
from thinwire.observe.ledger import Ledger
from thinwire.observe.stats import Stats
from thinwire.observe.writers import write_values
from thinwire.optim.base import Takeover
from thinwire.plan.advice import Advice
from thinwire.plan.candidates import QUALITIES
from thinwire.plan.policy import Rule, check_settings
from thinwire.plan.report import PlanReport, shorten
from thinwire.validate import check_choice, check_positive_int

logger = logging.getLogger(__name__)


class Handle:
    """A compressed gradient exchange at work: ask it what it does, save it, change it, end it.

    `tw.attach` and the other adapters make it, on a `reducer` for a `method` under a `policy`. It is also a
    `torch.distributed.checkpoint` Stateful. `takeover` holds what a method has taken over from the optimizer, if anything;
    `prospect` tells what can be taken over later. `skips` says whether steps may be discarded, and `form` how parameters that
    are spread over ranks are saved. `build` makes a reducer with the settings of this one from a method, a driver and a policy.
    """

    def __init__(
        self,
        reducer: Reducer,
        method: Method,
        policy: Sequence[Rule] = (),
        takeover: Takeover | None = None,
        *,
        skips: bool = True,
        form: checkpoint.WholeTensors = checkpoint.WHOLE,
        build: Callable[..., Reducer] = Reducer,
        prospect: Prospect | None = None,
    ) -> None:
        self.reducer = reducer
        self._form = form
        self._build = build
        self._find_group: FindGroup = take_group
        self._skips = skips
        self._on_close: list[Callable[[], None]] = []
        self._before_switch: list[Callable[[], None]] = []
        self.to_lose_nothing = "switch(tw.Dense()) and one more step"
        """What would have sent what `close` drops."""
        self.closed = False
        self.steering = Steering(self, method, policy, takeover, prospect or Prospect())

    # -- what it does ------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.reducer.driver.place.rank

    @property
    def world(self) -> int:
        return self.reducer.driver.place.world

    @property
    def beside(self) -> list[dist.ProcessGroup]:
        """The groups over which, one after the other, the ranks that share one copy of the model are reached; none unless it
        is sharded."""
        return self._form.groups()

    @property
    def ledger(self) -> Ledger:
        """What this rank has sent, by phase."""
        return self.reducer.driver.ledger

    @opaque
    def stats(self, *, dimensions: bool = False) -> Stats:
        """What was sent so far on this rank.

        `dimensions` adds which rows of each layer the last step left out (`Stats.dimensions`); that costs a selection or
        two, so ask for it when you want to see it.
        """
        reducer = self.reducer
        left_out = reducer.dimensions() if dimensions else None
        reducer.settle()
        memory_bytes = sum(memory.nbytes() for memory in reducer.assignments.memories())
        exposed_ms = reducer.exposure.milliseconds()
        return reducer.tally.stats(reducer.step, memory_bytes, left_out, exposed_ms)

    def log(self, writer: Any, step: int | None = None) -> None:
        """Write `stats().as_dict()` with `thinwire/` before each name: to a TensorBoard writer, a W&B run, `mlflow`, or a
        function of (values, step).

        `step` is the handle's own unless given. Every rank counts what it sends itself; one rank's curves are enough.

        >>> handle.log(wandb.run, step)
        """
        stats = self.stats()
        values = {f"thinwire/{name}": value for name, value in stats.as_dict().items()}
        write_values(writer, values, stats.steps if step is None else step)

    def __repr__(self) -> str:
        compressed = sum(not one.plan.dense for one in self.reducer.assignments.by_name.values())
        return (
            f"<Handle: rank {self.rank} of {self.world}, {self.reducer.step} steps, {compressed} of "
            f"{len(self.reducer.parameters)} parameters compressed{', closed' if self.closed else ''}>"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return f"<p>{escape(repr(self).strip('<>'))}</p>{self.stats()._repr_html_()}"

    def plan(self) -> PlanReport:
        """What happens to every parameter and why; print it."""
        passing = "sends what is held back once, then changes method"
        rows = tuple(
            replace(one.plan, reason=passing if one.flushing else self.steering.explain(one.plan))
            for one in self.reducer.assignments.by_name.values()
        )
        held, spare = self.reducer.assignments.memory_bytes()
        routes = self.reducer.routes
        kept = sum(route.kept_bytes for route in routes)
        return PlanReport(rows, backends_of(routes), held, spare, kept)

    def advise(self) -> Advice:
        """What every candidate would take, what is best and why; print it. Any rank may ask, at any time.

        `tw.Auto()` measures by itself. With another method `measure()` comes first.
        """
        return self.steering.advise()

    def measure(self, steps: int = 10, *, quality: str = "safe") -> None:
        """Measure `steps` steps, the link and all candidates, so that `advise()` can tell what would be better.

        Every rank calls it at the same step. Four steps come before, two of which send nothing until their last gradient is there. The method
        stays in use; the step after the last one measured takes a few seconds longer. `quality` limits what may be advised, as in `tw.Auto`.
        """
        self._refuse_if_closed()
        check_positive_int("steps", steps)
        check_choice("quality", quality, QUALITIES)
        self.steering.measure(steps, quality)

    @opaque
    def residual(self, name: str) -> Tensor:
        """What is held back of a parameter on this rank, in its shape; zeros if nothing is.

        Under `tw.exchange.Hierarchical` it is this rank's shard only; `shard(name)` says which part that is. What a switch
        or a change of the world left on this rank outside the shard goes to its owner in the next step, and is in
        `state_dict()` until then.
        """
        shard = self.shard(name)
        self.reducer.settle()
        held = self.reducer.assignments.held(name, "residual")
        info = self.reducer.parameters[name]
        if held is None:
            return torch.zeros(shard.shape, device=self.reducer.device)
        if held.shape == torch.Size(shard.shape):
            return held
        slot = info.slot(0)
        flat = held.new_empty(slot.numel)
        slot.view(flat).copy_(held)
        return slot.part(flat, shard).clone()

    def shard(self, name: str) -> Shard:
        """Which part of a parameter `residual(name)` holds: dimension, offset and size; the whole unless sharded.

        Under FSDP it is this rank's shard of what tensor parallelism has left of the parameter, if there is any.
        """
        parameters = self.reducer.parameters
        if name not in parameters:
            raise UsageError(f"name is {name!r}; the handle knows {shorten(list(parameters), 5)}")
        compressor = self.reducer.assignments.by_name[name].compressor
        part = compressor.shard(parameters[name].slot(0), self.reducer.driver.place)
        return (parameters[name].shard or part) if part.whole else part

    # -- changing it -------------------------------------------------------------------------------------------

    @opaque
    def switch(self, method: Method, *, policy: Sequence[Rule] | None = None) -> None:
        """Use another method from the next step on; every rank must call it at the same step.

        What is held back carries over, or is sent densely once where the new method has no place for it. Where momentum,
        or Adam's step, changes hands between the method and an optimizer that was passed to `attach`, one dense step comes
        first: all that is held back leaves with it, momentum is averaged over ranks, and the new owner goes on from there.
        """
        self._refuse_if_closed()
        check_settings(method, policy, False)
        for action in self._before_switch:
            action()
        self.steering.switch(method, policy)

    @opaque
    def discard_step(self) -> None:
        """Say that the last step was not applied: it then leaves no trace.

        Call it before the next backward or `switch`, on every rank, when you skip `optimizer.step()` by a rule of your own.
        Needs `skippable=True`, or a `grad_scaler`; with `skipped="keep"` what the step sent is held back again instead.
        """
        if not self._skips:
            raise UsageError(
                "skippable is False, so that memory cannot be what it was before the step; attach with skippable=True "
                "(which holds memory a second time), or with skipped='keep' to have what was sent return to memory"
            )
        self.reducer.settle(discard=True)

    @opaque
    def check_replicas(self) -> None:
        """Compare the parameters of all ranks now, bit for bit; every rank calls it at the same point, between steps.

        Replicas that differ are named, and raised or repaired as `on_difference` says. `attach(..., watch=100)` does it by itself.
        """
        self._refuse_if_closed()
        check_replicas(self.reducer)

    @opaque
    def close(self) -> None:
        """Stop compressing and free the memories; gradients are then averaged densely.

        What is still held back is dropped, with a warning, and momentum that a method took over starts from 0. To lose neither,
        `switch(tw.Dense())` and take one more step first: it sends what is held back, and the optimizer gets its momentum back.
        """
        if self.closed:
            return
        self.reducer.end_step()
        held = sum(memory.nbytes() for memory in self.reducer.assignments.memories())
        if not self.steering.give_back() and held:
            logger.warning(
                "close() drops %.1f MB of gradient that was held back; %s would have sent it",
                held / 1e6,
                self.to_lose_nothing,
            )
        self.closed = True
        for action in self._on_close:
            action()
        self.reducer.close()

    @opaque
    def regroup(
        self, process_group: dist.ProcessGroup | None = None, *, model: nn.Module | None = None
    ) -> None:
        """Go on among the ranks of another group, of the same or another size, with all that this rank holds back.

        Every rank of the new group calls it, between two steps. DDP cannot change its group: wrap the model in a new DDP
        over the new ranks and pass it as `model`. A rank that is new attaches and then calls `join()`.
        """
        self._refuse_if_closed()
        group = self._find_group(process_group, model)
        old = self.reducer
        method, rules = self.steering.begin_move()
        self.reducer = move(old, group, lambda driver: self._build(method, driver, policy=rules))
        old.close()
        self.join()
        self.steering.follow_move()

    @opaque
    def join(self) -> None:
        """Agree with the group on the step: ranks that are behind get the counters, and what was learned, from those ahead.

        `regroup` does it. A rank that has attached to a group that others moved to calls it while they call `regroup`.
        """
        self._refuse_if_closed()
        followers: list[Follower] = [self.reducer.assignments]
        if self.steering.takeover is not None:
            followers.append(self.steering.takeover)
        share_progress(self.reducer, followers)

    def movable(self, find_group: FindGroup) -> None:
        """Let `regroup` find the group by this function of what it is given; adapters call it."""
        self._find_group = find_group

    def on_close(self, action: Callable[[], None]) -> None:
        """Have `action` called when the handle closes."""
        self._on_close.append(action)

    def before_switch(self, action: Callable[[], None]) -> None:
        """Have `action` called before another method is used: nothing may be under way then."""
        self._before_switch.append(action)

    # -- saving it ---------------------------------------------------------------------------------------------

    @opaque
    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plain tensors and numbers, by parameter name."""
        self.reducer.settle()
        content = self.reducer.state_dict()
        self.steering.save_into(content)
        return checkpoint.wrap_rank(self.rank, self.world, content, self._form)

    @opaque
    def load_state_dict(
        self,
        state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        on_world_change: str | None = None,
    ) -> None:
        """Restore this rank's state.

        If another number of ranks saved, pass a list of all their states, and say what becomes of what was held back:
        `on_world_change="mean"` gives every rank the mean, `"reset"` drops it.
        """
        self._refuse_if_closed()
        states = [state] if isinstance(state, Mapping) else list(state)
        self._load(
            lambda: checkpoint.pick_rank(
                states, self.rank, self.world, on_world_change, self._form
            ),
            on_world_change,
        )

    def load_checkpoint(self, path: str | Path, *, on_world_change: str | None = None) -> None:
        """Restore from a distributed checkpoint that holds a handle, saved with any number of ranks."""
        self._refuse_if_closed()
        self._load(
            lambda: checkpoint.read_distributed(
                path, self.rank, self.world, on_world_change, self._form
            ),
            on_world_change,
        )

    def _load(self, find: Callable[[], dict[str, Any]], on_world_change: str | None) -> None:
        """Load what `find` returns, if all ranks have found something of the same step that fits."""

        def find_fitting() -> dict[str, Any]:
            content = find()
            self.reducer.assignments.check(content)
            return content

        content = checkpoint.find_together(self.reducer.driver, find_fitting, self._form)
        self.steering.before_load(content, reset=on_world_change == "reset")
        self.reducer.load_state_dict(content)
        self.steering.after_load(content)

    def _refuse_if_closed(self) -> None:
        if self.closed:
            raise UsageError("the handle is closed; attach again to compress")
