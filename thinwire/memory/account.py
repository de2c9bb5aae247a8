"""Account: the compensated gradient of one group in one step, and what of it was sent.

Memory commits at encode: what is sent is taken out of `c`, which is the memory's own buffer, in the same pass.
Whatever is not accepted later (a bad step, an unused parameter, an entry not kept globally) comes back
through `give_back`.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Account:
    def __init__(self, c: Tensor) -> None:
        self.c = c
        self._sent: list[tuple[Tensor, Tensor]] = []
        self._rounding: Tensor | None = None

    def write_off(self, positions: Tensor, contribution: Tensor) -> None:
        """Take `contribution` out of memory: it has been sent.

        Places that repeat (the unused places of a payload) must carry zeros.
        """
        contribution = contribution.to(self.c.dtype)
        self.c.index_add_(0, positions, contribution, alpha=-1)
        # A sum of finite numbers can still overflow. It is always selected, so this is the one place to see it.
        left = self.c[positions]
        self.c[positions] = torch.where(left.isfinite(), left, 0.0)
        self._sent.append((positions, contribution))

    def give_back(self, positions: Tensor, contribution: Tensor) -> None:
        """Put entries that were sent but not accepted back into memory."""
        contribution = contribution.to(self.c.dtype)
        self.c.index_add_(0, positions, contribution)
        self._sent.append((positions, -contribution))

    def bank(self, rounding: Tensor) -> None:
        """Remember what the cast of the update to a narrower gradient dtype lost; it joins memory at `settle`."""
        self._rounding = rounding

    def settle(self, bad: Tensor) -> None:
        """Close the step: if it was bad everything sent returns, otherwise the banked rounding is kept.

        Predicated on the device, because reading `bad` would make the host wait.
        """
        nothing = torch.zeros((), dtype=self.c.dtype, device=self.c.device)
        for positions, contribution in self._sent:
            self.c.index_add_(0, positions, torch.where(bad, contribution, nothing))
        if self._rounding is not None:
            self.c += torch.where(bad, nothing, self._rounding)
        self._sent.clear()
        self._rounding = None

    def accepted(self) -> Tensor:
        """This rank's accepted contribution so far, dense; for tests and measurements."""
        total = torch.zeros_like(self.c)
        for positions, contribution in self._sent:
            total.index_add_(0, positions, contribution)
        return total
