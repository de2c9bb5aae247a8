"""LocalRounds: the rounds of local steps on one rank, whoever runs its exchanges.

What travels is a pseudo-gradient: the last point that all workers had in common, less where this worker is now. An outer
optimizer applies its mean to the common point, and the workers go on from there. A round of one fragment of the model:

1. begin: the bucket gets point - parameter, and the reducer sends it by its method;
2. travel: `delay` inner steps go on meanwhile;
3. finish: the outer optimizer steps the point, and parameters move to it.

Workers may come to their end after different numbers of steps. Who is there already takes part in the rounds of the others, until
all are there; what is left then is averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from thinwire.adapters.common_point import CommonPoint, Fragment, cut_into_fragments, make_fragment
from thinwire.adapters.handles import make_handle
from thinwire.adapters.local_checks import check_owned, check_trained, listed, plain_module
from thinwire.adapters.local_settings import LocalSettings
from thinwire.engine.bucket_plan import deliver_nothing
from thinwire.engine.drivers import Driver
from thinwire.engine.failures import failing_as
from thinwire.engine.moving import refuse_to_move
from thinwire.engine.network import broadcast_into
from thinwire.engine.opaque import opaque
from thinwire.errors import UsageError
from thinwire.exchange.requests import Gather, Program
from thinwire.handle import Handle
from thinwire.layout import Bucket, describe_module, local_part
from thinwire.methods.base import Method
from thinwire.observe.stats import Stats
from thinwire.plan.report import PlanReport

STATE_VERSION = 2


@dataclass(eq=False)
class Round:
    """A fragment on its way."""

    fragment: Fragment
    due: int
    """The inner step after which it is finished."""
    futures: Sequence[Future[Tensor]]
    marks: Future[Tensor] | None = None
    """int64 [world, 2] of all workers: whether it is at its end, and the inner steps it has taken."""
    keep_local: float = 0.0
    """How much of its own place a parameter keeps when the round is finished."""
    bad: bool | None = None
    """Whether it counts for nothing; None until it has arrived."""
    last: bool = False
    """Whether all workers are at their end, so that their places are averaged."""
    most_steps: int = 0
    """Inner steps of the worker that has taken most."""


class LocalRounds:
    """Begins and finishes rounds as inner steps are counted. `connect` makes the driver of the parameters' device.

    A round in which some worker has a parameter that is not finite delivers nothing: all workers go back to the last common
    point with that fragment, and that round is lost. What it is given has passed `check_local`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        method: Method,
        connect: Callable[[torch.device], Driver],
        settings: LocalSettings,
        inside: dist.ProcessGroup | None = None,
    ) -> None:
        self._module = plain_module(model)
        self.optimizers: list[Optimizer] = listed(optimizer)
        self.settings = settings
        self.steps = 0
        """Inner steps so far, those that a GradScaler skipped included."""
        self.rounds = 0
        """Rounds that have ended, lost ones included."""
        self.lost_rounds = 0
        """Rounds that delivered nothing, because some worker had a parameter that was not finite."""
        self._inside = inside
        self.point = CommonPoint(describe_module(self._module), settings.point_device)
        self.outer = settings.make_outer(self.point.tensors.values())
        check_owned("outer", [self.outer], self.point.tensors, "which it was given to step")
        device = self.point.device
        self.fragments = cut_into_fragments(
            self.point, settings.fragments, device, settings.bucket_bytes
        )
        self._round: Round | None = None
        self.handle: Handle = make_handle(
            self.point.infos,
            method,
            lambda: connect(device),
            device=device,
            policy=settings.policy,
            deterministic=settings.deterministic,
            skippable=True,
            when_bad=deliver_nothing,
            settings={"local steps": str(settings), "outer optimizer": repr(self.outer)},
        )
        self.handle.movable(refuse_to_move)
        self.handle.before_switch(self.finish_now)
        self.handle.to_lose_nothing = "handle.switch(tw.Dense()) before finish()"
        # Inner steps go on while a round travels: nobody waits for it.
        self.handle.reducer.exposure.wanted = False

    # -- one inner step ----------------------------------------------------------------------------------------

    @opaque
    @torch.no_grad()
    def advance(self) -> None:
        """One inner step was taken: begin or finish a round if it is time."""
        self.begin_due()
        self.finish_due()

    @torch.no_grad()
    def begin_due(self) -> None:
        """Count the inner step, and begin the round of the fragment whose turn it is, if it is one's."""
        self.steps += 1
        turn = self.settings.starts.get(self.steps % self.settings.every)
        if turn is not None:
            check_trained(self._module, self.point.parameters)
            # One that was loaded may be due later: it was saved under other settings.
            self.finish_now()
            self._round = self._begin(self.fragments[turn])

    @torch.no_grad()
    def finish_due(self) -> None:
        """Finish the round that is due now, if there is one."""
        if self._round is not None and self.steps >= self._round.due:
            self.finish_now()

    @torch.no_grad()
    def finish_now(self) -> None:
        """Finish the round that is under way, due or not."""
        if self._round is not None:
            self._finish(self._arrived())
            self._round = None

    @torch.no_grad()
    def last_rounds(self) -> Iterator[None]:
        """Round after round, until all workers are at their end and have averaged every fragment.

        A round has begun at every yield; it is finished when the exchange has been run.
        """
        self.finish_now()
        turn, left = self.settings.turn_after(self.steps), len(self.fragments)
        while left:
            self._round = one = self._begin(self.fragments[turn], ending=True)
            yield
            self.finish_now()
            turn = (turn + 1) % len(self.fragments)
            left = left - 1 if one.last else len(self.fragments)
        self.steps = one.most_steps

    def _begin(self, fragment: Fragment, *, ending: bool = False) -> Round:
        """Send a fragment. A worker that is `ending` takes no inner steps meanwhile."""
        if self.handle.closed:
            raise UsageError(
                "these local steps are closed, so that no round can begin; call finish() before close(), and make new ones to go on"
            )
        reducer, settings = self.handle.reducer, self.settings
        mine = torch.tensor([int(ending), self.steps], device=self.point.device)
        marks = reducer.accompany(gather_marks(mine), "the workers' steps")
        futures = []
        for bucket in self._own(fragment):
            self.point.write_distance(bucket)
            futures.append(reducer.reduce(bucket))
        reducer.end_backward()
        keep_local = settings.keep_local if settings.delay and not ending else 0.0
        return Round(fragment, self.steps + settings.delay, futures, marks, keep_local)

    def _arrived(self) -> Round:
        """The round under way, once it is here on all ranks of this node."""
        one = self._round
        assert one is not None
        if one.bad is None:
            assert one.marks is not None
            for future in one.futures:
                future.wait()
            ending, steps = one.marks.wait().unbind(1)
            one.last, one.most_steps = bool(ending.all()), int(steps.max())
            reducer = self.handle.reducer
            one.bad = self._agree_inside(bool(reducer.verdict()))
            # What this rank has sent may be good, and that of its neighbours not.
            reducer.overrule(torch.tensor(one.bad, device=self.point.device))
            reducer.end_step()
            self._share_inside(one.fragment)
        return one

    def _own(self, fragment: Fragment) -> list[Bucket]:
        """The buckets this rank sends: all of them, or its share of what the replicas of a node all have."""
        if self._inside is None or self.point.sharded:
            return list(fragment.buckets)
        rank, world = dist.get_rank(self._inside), dist.get_world_size(self._inside)
        return list(fragment.buckets[rank::world])

    def _share_inside(self, fragment: Fragment) -> None:
        """The replicas of a node get what one of them received."""
        if self._inside is not None and not self.point.sharded:
            ranks = dist.get_process_group_ranks(self._inside)
            for index, bucket in enumerate(fragment.buckets):
                broadcast_into(bucket.flat, ranks[index % len(ranks)], self._inside)

    def _agree_inside(self, found: bool) -> bool:
        """Whether any rank of this node has found it."""
        if self._inside is None:
            return found
        flag = torch.tensor(int(found), device=self.point.device)
        with failing_as(self._inside, "verdicts"):
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._inside)
        return bool(flag)

    def _finish(self, one: Round) -> None:
        """1. The fragment's part of the point moves by what has arrived.  2. Parameters move to it."""
        self.rounds += 1
        if one.bad:
            self.lost_rounds += 1
            self._recover(one.fragment)
            return
        if one.last:
            self.point.subtract(one.fragment)
        else:
            with self.point.updates(one.fragment):
                self.outer.step()
        self.point.move_parameters(one.fragment, one.keep_local)

    def _recover(self, fragment: Fragment) -> None:
        """All workers go back to the point with this fragment. What is not finite elsewhere would spoil the next rounds as well:

        1. In the inner optimizers' state it becomes zero.
        2. A worker, or node, that has it in its other parameters goes back to the point with all of them.
        """
        self.point.move_parameters(fragment, 0.0)
        parts = [local_part(parameter) for parameter in self.point.parameters.values()]
        for state in chain.from_iterable(one.state.values() for one in self.optimizers):
            for value in map(local_part, tensors_in(state)):
                if value.is_floating_point():
                    torch.nan_to_num(value, 0.0, 0.0, 0.0, out=value)
        if self._agree_inside(not all(bool(part.isfinite().all()) for part in parts)):
            for other in self.fragments:
                self.point.move_parameters(other, 0.0)

    # -- what it does ------------------------------------------------------------------------------------------

    @property
    def travelling(self) -> bool:
        """Whether a round is on its way."""
        return self._round is not None

    def stats(self) -> Stats:
        """What was sent so far on this rank; a step of it is a round."""
        return self.handle.stats()

    def plan(self) -> PlanReport:
        """What happens to every parameter and why, and what the common point and all that belongs to it takes; print it."""
        tensors = self.point.tensors.values()
        away = {t.device.type for t in tensors} - {self.point.device.type}
        there = f" on the {away.pop()}" if away else ""
        buckets = [bucket.flat for one in self.fragments for bucket in one.buckets]
        beside = {
            f"the common point{there}": self.point.nbytes(),
            f"the outer optimizer{there}": state_bytes(self.outer),
            "memory of the buckets": max(
                (b.untyped_storage().nbytes() for b in buckets), default=0
            ),
        }
        report = self.handle.plan()
        # Fragments are about as large as each other.
        kept = report.kept_bytes // len(self.fragments)
        return replace(report, beside=beside, kept_bytes=kept)

    def close(self) -> None:
        """Finish the round under way, and take no further part. Parameters stay where they are."""
        try:
            self.finish_now()
        finally:
            self.handle.close()

    def drop_round(self) -> None:
        """The round under way, if it cannot be finished, counts for nothing: it leaves no trace in memory."""
        if self._round is not None:
            self.handle.reducer.abandon()
            self._round = None

    # -- state -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """This rank's state: the common point, the outer optimizer, what is held back, and a round that is under way.

        Parameters and the inner optimizer are not in it. They differ between ranks inside a round, so every rank saves its own.
        """
        travelling: dict[str, Any] = {}
        if self._round is not None:
            one = self._arrived()
            travelling = {
                "due": one.due,
                "keep_local": one.keep_local,
                "bad": int(bool(one.bad)),
                "update": self.point.read(one.fragment),
            }
        return {
            "version": STATE_VERSION,
            **self._counters(),
            "point": {name: tensor.detach().clone() for name, tensor in self.point.tensors.items()},
            "outer": deepcopy(self.outer.state_dict()),
            "round": travelling,
            "handle": self.handle.state_dict(),
        }

    def _counters(self) -> dict[str, int]:
        return {"steps": self.steps, "rounds": self.rounds, "lost_rounds": self.lost_rounds}

    def _count_from(self, state: Mapping[str, Any]) -> None:
        self.steps, self.rounds = int(state["steps"]), int(state["rounds"])
        self.lost_rounds = int(state["lost_rounds"])

    @torch.no_grad()
    def load_state_dict(
        self,
        state: Mapping[str, Any],
        *,
        others: Sequence[Mapping[str, Any]] = (),
        on_world_change: str | None = None,
    ) -> None:
        """Restore this rank's state. With another number of ranks `others` are the states of all that were saved."""
        if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION:
            raise UsageError(
                f"state is none of LocalSteps of version {STATE_VERSION}; pass what state_dict() returned"
            )
        self.drop_round()
        handles = [one["handle"] for one in others] or [state["handle"]]
        self.handle.load_state_dict(handles, on_world_change=on_world_change)
        self.point.load(state["point"])
        # Torch would go on with the very tensors of the state.
        self.outer.load_state_dict(deepcopy(dict(state["outer"])))
        self._count_from(state)
        travelling = state["round"]
        if travelling:
            # Fragments may be cut in another way here.
            fragment = make_fragment(
                self.point,
                list(travelling["update"]),
                self.point.device,
                self.settings.bucket_bytes,
            )
            self.point.write(fragment, travelling["update"])
            self._round = Round(
                fragment,
                travelling["due"],
                (),
                keep_local=travelling["keep_local"],
                bad=bool(travelling["bad"]),
            )


def tensors_in(state: Any) -> Iterator[Tensor]:
    """All tensors of an optimizer's state, which may lie in lists and dictionaries."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        yield from chain.from_iterable(map(tensors_in, state.values()))
    elif isinstance(state, list | tuple):
        yield from chain.from_iterable(map(tensors_in, state))


def state_bytes(optimizer: Optimizer) -> int:
    """What an optimizer keeps: so far, and of SGD also what comes with its first step."""
    held = sum(value.nbytes for state in optimizer.state.values() for value in tensors_in(state))
    to_come = sum(
        parameter.nbytes
        for group in optimizer.param_groups
        for parameter in group["params"]
        if isinstance(optimizer, torch.optim.SGD)
        and group["momentum"]
        and parameter not in optimizer.state
    )
    return held + to_come


def gather_marks(mine: Tensor) -> Program[Tensor]:
    (marks,) = yield (Gather(mine, "rounds", control_bytes=mine.nbytes),)
    return marks
