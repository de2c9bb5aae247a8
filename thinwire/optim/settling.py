"""SettlingWatch: whether Adam's second moments have settled, agreed over ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.exchange.requests import Program, Sum
from thinwire.methods.adam_scale import Settled
from thinwire.plan.planner import FAR
from thinwire.plan.policy import make_plan

if TYPE_CHECKING:
    from thinwire.engine.drivers import Driver
    from thinwire.handle import Handle

logger = logging.getLogger(__name__)

LOOKS = 5
"""In a window: a single second moment is as noisy as the few gradients in it."""
MOST_TENSORS = 0.75
"""The share of them that has to have settled: those of rare rows never do."""


@dataclass(eq=False)
class SettlingWatch:
    """Compares windows of steps with the one before."""

    _seen: list[Tensor] = field(default_factory=list)
    """Sizes in this window."""
    _before: Tensor | None = None
    """Their mean in the last one."""

    def has_settled(
        self, rule: Settled, sizes: Callable[[], Tensor], step: int, driver: Driver | None
    ) -> bool:
        """Whether the dense start may end, the same on all ranks; asked behind every step. The host waits at a window's end.

        `sizes` gives one number per tensor, the root of its mean second moment.
        """
        if step >= rule.at_most:
            logger.warning(
                "second moments have not settled within %g after %d steps; the dense start ends all the same",
                rule.tolerance,
                step,
            )
            return True
        ends = step % rule.steps == 0
        # At the end in any case: who has come a moment ago takes part in the agreement of the others.
        if ends or step % max(1, rule.steps // LOOKS) == 0:
            self._look(sizes())
        if not ends:
            return False
        alike = [one for one in self._seen if one.shape == self._seen[-1].shape]
        before, now = self._before, torch.stack(alike).mean(0)
        self._before, self._seen = now, []
        if step < rule.at_least:
            return False
        settled = torch.zeros((), device=now.device)
        if before is not None and before.shape == now.shape and now.numel():
            change = (now - before).abs() / before.clamp(min=torch.finfo(torch.float32).tiny)
            settled = (change.quantile(MOST_TENSORS) < rule.tolerance).float()
        return self._agree(settled, driver)

    def _look(self, now: Tensor) -> None:
        # What was read from a state lies on the CPU.
        self._seen = [*(one.to(now.device) for one in self._seen), now]
        self._before = None if self._before is None else self._before.to(now.device)

    # -- saving it -----------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """What it has seen, the same on all ranks, as text that every kind of checkpoint takes."""
        before = None if self._before is None else self._before.tolist()
        return json.dumps({"seen": [one.tolist() for one in self._seen], "before": before})

    @classmethod
    def from_json(cls, text: str) -> SettlingWatch:
        said = json.loads(text)
        before = said["before"]
        return cls(
            [torch.tensor(one) for one in said["seen"]],
            None if before is None else torch.tensor(before),
        )

    # -- together ------------------------------------------------------------------------------------------------

    def _agree(self, settled: Tensor, driver: Driver | None) -> bool:
        if driver is None or driver.place.world == 1:
            return bool(settled)
        total: Tensor = driver.run(_sum(settled), "the end of the dense start")
        return bool(total >= driver.place.world)


def _sum(settled: Tensor) -> Program[Tensor]:
    (total,) = yield (Sum(settled[None], "start", control_bytes=settled.nbytes),)
    return total[0]


def find_compressed(handle: Handle) -> list[str]:
    """The parameters that the handle's settings compress in the end."""
    reducer = handle.reducer
    infos, world = reducer.parameters.values(), reducer.driver.place.world
    plan = make_plan(infos, *handle.steering.settings(), world, FAR, quiet=True)
    return [name for name, one in plan.items() if not one.dense]


def measure_moments(states: Iterable[dict[str, Any]], beta2: float, device: torch.device) -> Tensor:
    """float32 on that device: the root of each mean second moment in an Adam's states, with the bias of its own steps corrected."""
    states = [state for state in states if "exp_avg_sq" in state]
    means = [state["exp_avg_sq"].mean(dtype=torch.float32) for state in states]
    if not means:
        return torch.empty(0, device=device)
    learned = [
        1 - beta2 ** state["step"].to(mean) for state, mean in zip(states, means, strict=True)
    ]
    # Before a parameter's first step both are 0.
    bias = torch.stack(learned).clamp(min=torch.finfo(torch.float32).tiny)
    return (torch.stack(means) / bias).sqrt()
