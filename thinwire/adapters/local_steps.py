"""LocalSteps: workers step by themselves, and exchange how far they have come every now and then.

For links that are slower than any compressed step. Douillard et al., "DiLoCo: Distributed Low-Communication Training of
Language Models" (2023), and "Streaming DiLoCo with overlapping communication" (2025).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from thinwire.adapters.checks import find_group
from thinwire.adapters.local_rounds import LocalRounds
from thinwire.adapters.local_settings import LocalSettings, MakeOptimizer, published_outer
from thinwire.engine.device_drivers import make_driver
from thinwire.engine.loss_scale import scale_reader
from thinwire.engine.network import share_from_first
from thinwire.errors import UsageError
from thinwire.methods.base import Dense, Method
from thinwire.plan.policy import Rule


class LocalSteps(LocalRounds):
    """Local steps on top of a model and its optimizer. `optimizer.step()` does all of it; the rest of the script stays.

    Parameters and buffers are broadcast from rank 0 of the group at construction. A round in which some worker has a
    parameter that is not finite delivers nothing: all workers go back to the last common point, and that round is lost.

    Workers wait for each other at the end of every round, so each has to take its steps. One that ends before the others calls
    `finish()`; steps that a GradScaler skips count if it is given.

    Args:
        model: A plain model, DDP over the fast links of a node, or FSDP2 shards over them.
        optimizer: The inner optimizer, any.
        method: How pseudo-gradients are sent, such as tw.Quantized(bits=4); whole unless given.
        every: Inner steps from one round of a parameter to its next.
        outer: Settings of the outer torch.optim.SGD, or a function that makes an optimizer of the common point's
            parameters; lr 0.7 and Nesterov momentum 0.9 unless given.
        fragments: Parts of the model that take turns, at equal distances within `every` steps.
        delay: Inner steps that go on while a round travels; less than there are between two rounds.
        keep_local: How much of its own place a parameter keeps where a round with a `delay` ends: 0 puts it on the common
            point, 1 would leave it where it is.
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
        optimizer: Optimizer,
        method: Method | None = None,
        *,
        every: int,
        outer: Mapping[str, Any] | MakeOptimizer | None = None,
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
            outer=published_outer() if outer is None else outer,
            fragments=fragments,
            delay=delay,
            keep_local=keep_local,
            policy=policy,
            deterministic=deterministic,
            point_device=point_device,
            bucket_mb=bucket_mb,
        )
        scale_reader(grad_scaler)
        group = find_group(process_group)
        if inside_group is not None and process_group is None:
            raise UsageError(
                "inside_group is given and process_group is not; it must be the ranks of other nodes that this one "
                "exchanges with"
            )
        self._group = group
        self._model = model
        share_from_first(model.state_dict().values(), group, inside_group)
        super().__init__(
            model,
            optimizer,
            method or Dense(),
            lambda device: make_driver(group, device),
            settings,
            inside_group,
        )
        hook = optimizer.register_step_post_hook(lambda *_: self.advance())
        self._stop_counting = [hook.remove]
        if grad_scaler is not None:
            self._stop_counting.append(self._count_skipped(grad_scaler))

    def _count_skipped(self, grad_scaler: Any) -> Callable[[], None]:
        """Count what the scaler skips: the optimizer's own hooks are silent then. Returns what ends it."""
        step = grad_scaler.step

        def step_and_count(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = self.steps
            result = step(optimizer, *args, **kwargs)
            if optimizer is self.optimizer and self.steps == before and not self.handle.closed:
                self.advance()
            return result

        def stop() -> None:
            if grad_scaler.step is step_and_count:
                grad_scaler.step = step

        grad_scaler.step = step_and_count
        return stop

    @torch.no_grad()
    def finish(self) -> None:
        """Come together: all workers have the same parameters afterwards, and the buffers of the first.

        Every rank calls it behind its last inner step, or before an evaluation; training may go on. Workers may have taken
        different numbers of steps: who comes first takes part in the rounds of the others until they come. What was not
        exchanged yet is averaged, without the outer optimizer.
        """
        for _ in self.last_rounds():
            pass
        share_from_first(self._model.buffers(), self._group, self._inside)

    def close(self) -> None:
        """Finish the round under way, and take no further part. Parameters stay where they are: `finish()` first."""
        for stop in self._stop_counting:
            stop()
        super().close()

    @torch.no_grad()
    def welcome(self, source: int = 0) -> None:
        """Give newcomers the common point, the outer optimizer's state and the count of steps of rank `source`.

        Every rank of the group calls it between two inner steps. All of them go on from the common point.
        """
        self.finish_now()
        root = dist.get_process_group_ranks(self._group)[source]
        self.steps = self.point.share(self.outer, self.steps, root, self._group)
        for fragment in self.fragments:
            self.point.move_parameters(fragment, 0.0)
