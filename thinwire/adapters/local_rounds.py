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
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.adapters.checks import check_parameters
from thinwire.adapters.common_point import CommonPoint, Fragment, cut_into_fragments
from thinwire.adapters.handles import make_handle
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
from thinwire.plan.policy import check_settings
from thinwire.plan.report import PlanReport
from thinwire.validate import check_instance

STATE_VERSION = 1


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
    point, and that round is lost.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        method: Method,
        connect: Callable[[torch.device], Driver],
        settings: LocalSettings,
        inside: dist.ProcessGroup | None = None,
    ) -> None:
        check_instance("model", model, nn.Module, "a torch.nn.Module")
        check_instance("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
        check_settings(method, settings.policy, settings.deterministic)
        if method.takes_over is not None:
            raise UsageError(
                f"method is {type(method).__name__}, which takes momentum over from an optimizer; local steps have an "
                "outer optimizer for that, use a method without momentum"
            )
        described = describe_module(plain_module(model))
        check_parameters(None, {name: pair[0] for name, pair in described.items()})
        _check_owned(optimizer, {name: pair[0] for name, pair in described.items()})
        self.optimizer = optimizer
        self.settings = settings
        self.steps = 0
        """Inner steps so far, those that a GradScaler skipped included."""
        self.rounds = 0
        """Rounds that have ended, lost ones included."""
        self.lost_rounds = 0
        """Rounds that delivered nothing, because some worker had a parameter that was not finite."""
        self._inside = inside
        self.point = CommonPoint(described, settings.point_device)
        self.outer = settings.make_outer(self.point.tensors.values())
        device = self.point.device
        self.fragments = cut_into_fragments(
            self.point, settings.fragments, device, int(settings.bucket_mb * 2**20)
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
        reducer, settings = self.handle.reducer, self.settings
        mine = torch.tensor([int(ending), self.steps], device=self.point.device)
        marks = reducer.accompany(gather_marks(mine), "the workers' steps")
        futures = []
        for bucket in self._own(fragment):
            self.point.write_distance(bucket)
            futures.append(reducer.reduce(bucket))
        reducer.flush()
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
            bad = reducer.verdict().clone()
            reducer.end_step()
            one.bad = self._share_inside(one.fragment, bad)
        return one

    def _own(self, fragment: Fragment) -> list[Bucket]:
        """The buckets this rank sends: all of them, or its share of what the replicas of a node all have."""
        if self._inside is None or self.point.sharded:
            return list(fragment.buckets)
        rank, world = dist.get_rank(self._inside), dist.get_world_size(self._inside)
        return list(fragment.buckets[rank::world])

    def _share_inside(self, fragment: Fragment, bad: Tensor) -> bool:
        """Whether the round is bad for any rank of this node; its replicas get what one of them received."""
        if self._inside is None:
            return bool(bad)
        flag = bad.to(torch.int32)
        with failing_as(self._inside, "verdicts"):
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._inside)
        if not self.point.sharded:
            ranks = dist.get_process_group_ranks(self._inside)
            for index, bucket in enumerate(fragment.buckets):
                broadcast_into(bucket.flat, ranks[index % len(ranks)], self._inside)
        return bool(flag)

    def _finish(self, one: Round) -> None:
        """1. The fragment's part of the point moves by what has arrived.  2. Parameters move to it."""
        self.rounds += 1
        if one.bad:
            self.lost_rounds += 1
            self._clean_state(one.fragment)
        elif one.last:
            self.point.subtract(one.fragment)
        else:
            with self.point.updates(one.fragment):
                self.outer.step()
        self.point.move_parameters(one.fragment, 0.0 if one.bad else one.keep_local)

    def _clean_state(self, fragment: Fragment) -> None:
        """What is not finite in the inner optimizer's state would spoil the next round as well."""
        for name in fragment.names:
            for value in self.optimizer.state.get(self.point.parameters[name], {}).values():
                if isinstance(value, Tensor) and value.is_floating_point():
                    torch.nan_to_num(local_part(value), 0.0, 0.0, 0.0, out=local_part(value))

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
        self.finish_now()
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
            number = self.fragments.index(one.fragment)
            travelling = {
                "fragment": number,
                "due": one.due,
                "keep_local": one.keep_local,
                "bad": int(bool(one.bad)),
                "update": self.point.read(one.fragment),
            }
        return {
            "version": STATE_VERSION,
            **self._counters(),
            "point": {name: tensor.detach().clone() for name, tensor in self.point.tensors.items()},
            "outer": self.outer.state_dict(),
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
        handles = [one["handle"] for one in others] or [state["handle"]]
        self.handle.load_state_dict(handles, on_world_change=on_world_change)
        self.point.load(state["point"])
        self.outer.load_state_dict(dict(state["outer"]))
        self._count_from(state)
        self._round = None
        travelling = state["round"]
        if travelling:
            fragment = self.fragments[travelling["fragment"]]
            self.point.write(fragment, travelling["update"])
            self._round = Round(
                fragment,
                travelling["due"],
                (),
                keep_local=travelling["keep_local"],
                bad=bool(travelling["bad"]),
            )


def state_bytes(optimizer: Optimizer) -> int:
    """What an optimizer keeps: so far, and of SGD also what comes with its first step."""
    held = sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
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


def plain_module(model: nn.Module) -> nn.Module:
    """The model inside DDP, whose parameters have their own names."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _check_owned(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> None:
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, parameter in named.items() if id(parameter) not in owned]
    if missing:
        raise UsageError(
            f"optimizer does not have {missing[0]!r}, which the model trains; it must have all of the model's parameters"
        )
