"""LowRankAccount: what a rank sent of its matrices in one step, and the bases that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.lowrank.basis import exact_products
from thinwire.lowrank.layout import FactorLayout
from thinwire.lowrank.memory import LowRankMemory
from thinwire.memory.account import Account


@dataclass(eq=False)
class Sent:
    """Factors on their way: of every matrix this rank accounts for factor x basis^T, or its transpose on side "q"."""

    layout: FactorLayout
    factors: Tensor
    """Flat, in `layout`."""
    bases: list[Tensor]
    """The other factor, one tensor per batch; all ranks had it before."""
    renewed: Tensor
    """Bases for later steps, in `layout`, out of the sum of all ranks' factors."""
    replaced: Tensor | None = None
    """The bases they took the place of."""

    def add_to(self, flat: Tensor, good: Tensor, alpha: int) -> None:
        """Add alpha x the products of the elements whose flag is up to the matrices in `flat`."""
        kept = torch.where(good, self.factors, 0.0)
        sections = self.layout.sections(kept)
        for batch, side, factor, basis in zip(
            self.layout.batches, self.layout.sides, sections, self.bases, strict=True
        ):
            p, q = (factor, basis) if side == "p" else (basis, factor)
            batch.add(flat, p, q, alpha)


class LowRankAccount(Account):
    """Takes what was sent out of memory when the step turns out good, not before.

    So a bad step costs nothing: `c` still holds every bit, no second buffer of its size is needed, and the bases
    stay what they were. The same holds for parameters that no rank had a gradient for.
    """

    def __init__(self, c: Tensor, memory: LowRankMemory, slots: int) -> None:
        super().__init__(c)
        self.memory = memory
        self.used = torch.zeros(slots, dtype=torch.bool, device=c.device)
        """bool [slots]: some rank had a gradient, so the update is delivered."""
        self.sent: Sent | None = None

    def settle(self, bad: Tensor) -> None:
        """Take out what was accepted; on a second call put back what a later verdict has turned bad."""
        if self.sent is not None:
            with exact_products(self.c.device):
                self._settle_sent(self.sent, bad)
        # A sum of finite numbers can overflow. The step is bad then, so a host that may look has to clean only then.
        if self.c.device.type != "cpu" or bool(bad):
            torch.nan_to_num_(self.c, nan=0.0, posinf=0.0, neginf=0.0)
        super().settle(bad)

    def _settle_sent(self, sent: Sent, bad: Tensor) -> None:
        good = sent.layout.spread(self.used & ~bad)
        if self._verdict is None:
            sent.add_to(self.c, good, -1)
            sent.replaced = self.memory.bases(sent.layout, self.c)
        else:
            sent.add_to(self.c, sent.layout.spread(self.used & bad & ~self._verdict), 1)
        assert sent.replaced is not None
        self.memory.keep(sent.layout, torch.where(good, sent.renewed, sent.replaced))

    def accepted(self) -> Tensor:
        total = torch.zeros_like(self.c)
        if self.sent is not None:
            with exact_products(self.c.device):
                self.sent.add_to(total, self.sent.layout.spread(self.used), 1)
        return total
