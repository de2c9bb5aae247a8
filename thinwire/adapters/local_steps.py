"""LocalSteps: workers step by themselves, and exchange how far they have come every now and then.

For links that are slower than any compressed step. Douillard et al., "DiLoCo: Distributed Low-Communication Training of
Language Models" (2023), and "Streaming DiLoCo with overlapping communication" (2025).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.adapters.checks import find_group
from thinwire.adapters.common_point import forget_gathered
from thinwire.adapters.local_checks import check_apart, check_local, listed
from thinwire.adapters.local_rounds import LocalRounds
from thinwire.adapters.local_settings import NESTEROV, LocalSettings, MakeOptimizer
from thinwire.adapters.simulate_local import LocalSimulation
from thinwire.engine.device_drivers import make_driver
from thinwire.engine.loss_scale import scale_reader
from thinwire.engine.moving import from_bytes, take_group, to_bytes
from thinwire.engine.network import broadcast_into, share_from_first
from thinwire.errors import ExchangeError, UsageError
from thinwire.layout import local_part
from thinwire.methods.base import Dense, Method
from thinwire.plan.policy import Rule
from thinwire.validate import check_instance

_counted: WeakSet[Optimizer] = WeakSet()
"""Whose steps are counted already."""


def refuse_counted(optimizer: Optimizer | Sequence[Optimizer]) -> None:
    """Refuse an optimizer that takes part in local steps which were not closed."""
    if not _counted.isdisjoint(listed(optimizer)):
        raise UsageError(
            "local steps were begun twice with this optimizer, so that every step would count in both; close() the first ones"
        )


class LocalSteps(LocalRounds):
    """Local steps on top of a model and its optimizer. `optimizer.step()` does all of it; the rest of the script stays.

    Parameters and buffers are broadcast from rank 0 of the group at construction. A round in which some worker has a
    parameter that is not finite delivers nothing: all workers go back to the last common point, and that round is lost.
    What is trained stays the same: to freeze, unfreeze or add parameters `finish()` and `close()`, and begin again.

    Workers wait for each other at the end of every round, so each has to take its steps. One that ends before the others calls
    `finish()`; steps that a GradScaler skips count if it is given.

    Args:
        model: A plain model, DDP over the fast links of a node, or FSDP2 shards over them.
        optimizer: The inner optimizer; any will do. A list if several share the parameters, such as Muon and AdamW: a step
            is counted when the last of them has stepped.
        method: How pseudo-gradients are sent, such as tw.Quantized(bits=4); whole unless given.
        every: Inner steps from one round of a parameter to its next.
        outer: Settings of the outer torch.optim.SGD, or a function that makes an optimizer of the common point's
            parameters; lr 0.7 and Nesterov momentum 0.9 unless given.
        fragments: Parts of the model that are exchanged in turn, at equal distances within `every` steps.
        delay: Inner steps taken while a round is under way; fewer than there are between two rounds.
        keep_local: The share of its own value that a parameter keeps when a round with a `delay` ends: 0 sets it to the
            common point, 1 would leave it as it is.
        process_group: The ranks to exchange with; all unless given.
        inside_group: The ranks of this node, where the model is a DDP or FSDP2 model over them. Replicas of a node share the
            sending.
        grad_scaler: The GradScaler of the loss, if there is one. A step that it skips on one worker counts as taken: without
            it that worker would fall behind, and the others would wait for it.
        policy: Rules for single parameters; the first match wins.
        deterministic: Add dense parts in rank order, so that resuming is bit-exact whatever the bucketing.
        point_device: Where the common point lies, such as "cpu"; with the parameters unless given.
        bucket_mb: Megabytes that are sent together.

    >>> local = tw.LocalSteps(model, optimizer, tw.Quantized(bits=4), every=32)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        method: Method | None = None,
        *,
        every: int,
        outer: Mapping[str, Any] | MakeOptimizer = NESTEROV,
        fragments: int = 1,
        delay: int = 0,
        keep_local: float = 0.5,
        process_group: dist.ProcessGroup | None = None,
        inside_group: dist.ProcessGroup | None = None,
        grad_scaler: Any = None,
        policy: Sequence[Rule] | None = None,
        deterministic: bool = False,
        point_device: str | torch.device | None = None,
        bucket_mb: float = 25,
    ) -> None:
        settings = LocalSettings(
            every=every,
            outer=outer,
            fragments=fragments,
            delay=delay,
            keep_local=keep_local,
            policy=policy,
            deterministic=deterministic,
            point_device=point_device,
            bucket_mb=bucket_mb,
        )
        method = method or Dense()
        check_instance("model", model, nn.Module, "a torch.nn.Module")
        forget_gathered(model)
        check_local(model, optimizer, method, settings)
        refuse_counted(optimizer)
        scale_reader(grad_scaler)
        group = find_group(process_group)
        if inside_group is not None and process_group is None:
            raise UsageError(
                "inside_group is given and process_group is not; it must be the ranks of other nodes that this one "
                "exchanges with"
            )
        check_apart(model, group)
        self._group = group
        share_from_first(model.state_dict().values(), group, inside_group)
        super().__init__(
            model,
            optimizer,
            method,
            # Gradients of the inner steps may travel inside the node meanwhile.
            lambda device: make_driver(group, device, in_turn=True),
            settings,
            inside_group,
        )
        self.handle.movable(take_group)
        hook = self.optimizers[-1].register_step_post_hook(lambda *_: self.advance())
        _counted.update(self.optimizers)
        self._stop_counting = [hook.remove, lambda: _counted.difference_update(self.optimizers)]
        if grad_scaler is not None:
            self._stop_counting.append(self._count_skipped(grad_scaler))

    def _count_skipped(self, grad_scaler: Any) -> Callable[[], None]:
        """Count what the scaler skips: the optimizer's own hooks are silent then. Returns what ends it."""
        step = grad_scaler.step

        def step_and_count(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = self.steps
            result = step(optimizer, *args, **kwargs)
            if optimizer is self.optimizers[-1] and self.steps == before and not self.handle.closed:
                self.advance()
            return result

        def stop() -> None:
            if grad_scaler.step is step_and_count:
                grad_scaler.step = step

        grad_scaler.step = step_and_count
        return stop

    @torch.no_grad()
    def finish(self) -> None:
        """Make all workers equal: afterwards they have the same parameters, and the buffers of the first.

        Every rank calls it after its last inner step, or before an evaluation; training may go on. Workers may have taken
        different numbers of steps: the first to call it takes part in the rounds of the others until they call it too.
        What was not exchanged yet is averaged, without the outer optimizer.
        """
        forget_gathered(self._module)
        for _ in self.last_rounds():
            pass
        share_from_first(self._module.buffers(), self._group, self._inside)

    @staticmethod
    def simulate(
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer | Sequence[Optimizer]],
        method: Method | None = None,
        **settings: Any,
    ) -> LocalSimulation:
        """Local steps of as many workers as there are models, in this process.

        Args:
            models: One per worker, all of one kind. All get the parameters of the first.
            optimizers: One per worker, or several.
            method: How pseudo-gradients are sent; whole unless given.
            settings: Those of `tw.LocalSteps`.

        >>> sim = tw.LocalSteps.simulate(models, optimizers, tw.Quantized(bits=4), every=32)
        >>> for model, optimizer, batch in zip(models, optimizers, batches):
        ...     model(batch).backward(), optimizer.step(), optimizer.zero_grad()
        >>> sim.step()
        """
        return LocalSimulation(models, optimizers, method, **settings)

    def close(self) -> None:
        """Finish the round under way, and take no further part. Parameters stay where they are: `finish()` first."""
        for stop in self._stop_counting:
            stop()
        super().close()

    # -- other workers -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def regroup(self, process_group: dist.ProcessGroup) -> None:
        """Go on among the ranks of another group, of the same or another size, with all that this rank holds back.

        Every rank of the new group calls it, between two inner steps. A round under way is finished, or counts for nothing if one
        of the old ranks is lost. A rank that is new makes its LocalSteps in the new group instead, and then calls `join()`.
        """
        forget_gathered(self._module)
        try:
            self.finish_now()
        except ExchangeError:
            self.drop_round()
        # Newcomers take part in a broadcast when they are made. What these ranks have stays.
        own = [value for value in self._module.state_dict().values() if isinstance(value, Tensor)]
        share_from_first((local_part(value).clone() for value in own), process_group)
        self.handle.regroup(process_group)
        self._group = process_group
        self._catch_up(new=False)

    @torch.no_grad()
    def join(self) -> None:
        """Go on from where the others are: a rank that has come to a group that others moved to calls it while they call `regroup`.

        It takes over the common point, the outer optimizer's state, buffers, frozen parameters, counters and what was learned. It
        holds nothing back, and its inner optimizer is as it was made.
        """
        forget_gathered(self._module)
        self.handle.join()
        self._catch_up(new=True)

    def _catch_up(self, new: bool) -> None:
        """Who is new or behind takes over from the first of those who are furthest."""
        driver = self.handle.reducer.driver
        progress = [int(one) for one in driver.gather(str(-1 if new else self.rounds).encode())]
        most = max(progress)
        behind = progress[driver.place.rank] < most
        if min(progress) == most:
            return
        source = progress.index(most)
        root = dist.get_process_group_ranks(self._group)[source]
        own = to_bytes({**self._counters(), "outer": self.outer.state_dict()})
        received = from_bytes(driver.broadcast(own, source))
        self.point.share(root, self._group)
        frozen = (p for p in self._module.parameters() if not p.requires_grad)
        for value in map(local_part, chain(self._module.buffers(), frozen)):
            broadcast_into(value if behind else value.clone(), root, self._group)
        if behind:
            self._count_from(received)
            self.outer.load_state_dict(received["outer"])
            for fragment in self.fragments:
                self.point.move_parameters(fragment, 0.0)
