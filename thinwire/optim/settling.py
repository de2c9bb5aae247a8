"""SettlingWatch: whether Adam's second moments have settled, agreed over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.exchange.requests import Program, Sum
from thinwire.methods.adam_scale import Settled

if TYPE_CHECKING:
    from thinwire.engine.drivers import Driver


@dataclass(eq=False)
class SettlingWatch:
    """Looks every few steps. What it saw last is not saved: after a restart it needs two looks again."""

    _sizes: Tensor | None = None
    """Of every tensor's second moment at the last look, its sum."""
    _looked: int = 0

    def has_settled(
        self,
        rule: Settled,
        moments: Sequence[Tensor],
        step: int,
        beta2: float,
        driver: Driver | None,
    ) -> bool:
        """Whether all tensors have, on all ranks; asked in every step. The host waits where it looks."""
        if not moments or step < rule.at_least or step - self._looked < rule.steps:
            return False
        # The start from 0 is corrected, as Adam does it.
        sizes = torch.stack([v.sum(dtype=torch.float32) for v in moments]) / (1 - beta2**step)
        before, self._sizes, self._looked = self._sizes, sizes, step
        if before is None or before.shape != sizes.shape:
            return self._agree(torch.zeros((), device=sizes.device), driver)
        change = (sizes - before).abs() / before.clamp(min=torch.finfo(torch.float32).tiny)
        return self._agree((change.amax() < rule.tolerance).float(), driver)

    def _agree(self, settled: Tensor, driver: Driver | None) -> bool:
        if driver is None or driver.place.world == 1:
            return bool(settled)
        total: Tensor = driver.run(_sum(settled), "the end of the dense start")
        return bool(total >= driver.place.world)


def _sum(settled: Tensor) -> Program[Tensor]:
    (total,) = yield (Sum(settled[None], "start", control_bytes=settled.nbytes),)
    return total[0]
