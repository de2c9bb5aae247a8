"""LowRankAccount: what a rank sent of its matrices in one step, and the bases that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.inspection import drop_if_bad
from thinwire.lowrank.basis import exact_products
from thinwire.lowrank.layout import FactorLayout, Factors
from thinwire.lowrank.memory import LowRankMemory
from thinwire.memory.account import Account


@dataclass(eq=False)
class Sent:
    """Factors on their way. Of every matrix this rank accounts for factor x basis^T, on side "q" for its transpose."""

    layout: FactorLayout
    factors: Tensor
    """Flat, in `layout`."""
    known: Factors
    """The other factors; all ranks had them before."""
    renewed: Tensor
    """Bases for later steps, in `layout`, out of the sum of all ranks' factors."""
    had: Tensor
    """float [slots]: how many ranks had a gradient; the update is delivered if any had."""
    memory: LowRankMemory
    """Where the bases rest."""
    replaced: Tensor | None = None
    """The bases they took the place of."""
    divisor: Tensor | None = None
    """Flat as memory is: what was divided by before the products; None = nothing."""

    def add_to(self, flat: Tensor, good: Tensor, alpha: int) -> None:
        """Add alpha x the products of the elements whose flag is up to the matrices in `flat`."""
        kept = torch.where(good, self.factors, 0.0)
        if self.divisor is not None:
            products = torch.zeros_like(flat)
            self._add_products(products, kept, 1)
            flat.add_(products.mul_(self.divisor), alpha=alpha)
        else:
            self._add_products(flat, kept, alpha)

    def _add_products(self, flat: Tensor, kept: Tensor, alpha: int) -> None:
        with exact_products(flat.device):
            for batch, side, factor, basis in zip(
                self.layout.batches,
                self.layout.sides,
                self.layout.sections(kept),
                self.known.sections,
                strict=True,
            ):
                p, q = (factor, basis) if side == "p" else (basis, factor)
                batch.add(flat, p, q, alpha)

    def settle(self, c: Tensor, bad: Tensor, before: Tensor | None) -> None:
        """Take out what was accepted. After an earlier verdict: put back what this one has turned bad."""
        used = self.had > 0
        good = self.layout.spread(used & ~bad)
        if before is None:
            self.add_to(c, good, -1)
            self.replaced = self.memory.bases(self.layout, c)
        else:
            self.add_to(c, self.layout.spread(used & bad & ~before), 1)
        assert self.replaced is not None
        self.memory.keep(self.layout, torch.where(good, self.renewed, self.replaced))
        drop_if_bad(c, bad)

    def accepted(self, c: Tensor) -> Tensor:
        total = torch.zeros_like(c)
        self.add_to(total, self.layout.spread(self.had > 0), 1)
        return total


class LowRankAccount(Account):
    """Takes what was sent out of memory when the step turns out good, not before.

    So a bad step costs nothing: `c` still holds every bit, no second buffer of its size is needed, and the bases
    stay what they were. The same holds for parameters that no rank had a gradient for.
    """

    def __init__(self, c: Tensor, held: Account | None = None) -> None:
        """With the account of what c was made from, if the verdict is to reach that too."""
        super().__init__(c)
        self.sent: Sent | None = None
        self._held = held

    def settle(self, bad: Tensor) -> None:
        if self.sent is None:
            drop_if_bad(self.c, bad)
        else:
            self.sent.settle(self.c, bad, self._verdict)
        if self._rounding is None:
            self._verdict = bad
        else:
            super().settle(bad)
        if self._held is not None:
            self._held.settle(bad)

    def accepted(self) -> Tensor:
        return torch.zeros_like(self.c) if self.sent is None else self.sent.accepted(self.c)
