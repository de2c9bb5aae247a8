"""Account: the compensated gradient of one group in one step, and what of it was sent.

Memory commits at encode: what is sent is taken out of `c`, which is the memory's own buffer, in the same pass.
Whatever is not accepted later (a bad step, an unused parameter, an entry not kept globally) comes back
through `give_back`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from thinwire.kernels.cuda.joint import Joint, JointKernel
from thinwire.kernels.inspection import drop_if_bad


class WholeSent(Protocol):
    """Everything was sent, in a form from which it can be told again."""

    def return_to(self, c: Tensor, flag: Tensor) -> None:
        """If the flag is up (bool []), make `c` what it was before anything was taken out of it, as far as it was accepted."""

    def add_to(self, total: Tensor) -> None:
        """Add this rank's accepted contribution."""


class Account:
    """What one group took out of memory in one step: `c`, the compensated gradient, and what of it was sent."""

    def __init__(self, c: Tensor) -> None:
        self.c = c
        self._sent: list[tuple[Tensor, Tensor]] = []
        self._everything: WholeSent | None = None
        self._rounding: Tensor | None = None
        self._verdict: Tensor | None = None
        self.shared_when_dense: list[Tensor] = []
        """Buffers beside c that have to be the same on all ranks once the slots are dense, such as a momentum."""
        self.flushed: Tensor | None = None
        """bool [slots]: whose memory was delivered and is empty now; None where nothing is flushed."""

    def write_off(
        self, positions: Tensor, contribution: Tensor, *, held: Tensor | None = None
    ) -> None:
        """Take `contribution` out of memory: it has been sent.

        Places that repeat (the unused places of a payload) must carry zeros. `held` is what c held there before, if
        the caller has it at hand: a look at scattered places costs a CPU a cache miss each.
        """
        contribution = contribution.to(self.c.dtype)
        self.c.index_add_(0, positions, contribution, alpha=-1)
        self._drop_overflow(positions, held)
        self._sent.append((positions, contribution))

    def write_off_all(self, sent: WholeSent) -> None:
        """Note what was sent of every element. The caller has taken it out of c."""
        self._everything = sent

    def _drop_overflow(self, positions: Tensor, held: Tensor | None) -> None:
        """A sum of finite numbers can overflow; nothing of that may stay.

        An infinity is always among the selected, which flags the step, so that looking there is enough to know. An
        accelerator would have to wait for the answer: it cleans what was selected, and the rest when the verdict is there.
        """
        if self.c.device.type != "cpu":
            self.c[positions] = torch.nan_to_num(self.c[positions], 0.0, 0.0, 0.0)
            return
        selected = self.c[positions] if held is None else held
        # 0 times anything but a finite number is not 0, which is known sooner than by `isfinite`.
        if bool((selected * 0).sum() != 0):
            torch.nan_to_num(self.c, 0.0, 0.0, 0.0, out=self.c)

    def drop_all_overflow(self) -> Tensor:
        """bool []: c overflowed somewhere. Nothing of that stays."""
        overflow = ~self.c.isfinite().all()
        drop_if_bad(self.c, overflow)
        return overflow

    def give_back(self, positions: Tensor, contribution: Tensor) -> None:
        """Put entries that were sent but not accepted back into memory."""
        contribution = contribution.to(self.c.dtype)
        if contribution.device.type == "cpu" and not bool(contribution.any()):
            return  # the usual case, and the places are all over memory
        self.c.index_add_(0, positions, contribution)
        self._sent.append((positions, -contribution))

    def bank(self, rounding: Tensor) -> None:
        """Remember what the cast of the update to a narrower gradient dtype lost; it joins memory at `settle`."""
        self._rounding = rounding

    def rest(self) -> None:
        """The exchange has ended: nothing but the verdict is still to come. Narrow storages pack memory here."""

    def settle(self, bad: Tensor) -> None:
        """Apply the step's verdict: if it is bad everything sent returns, otherwise the banked rounding is kept.

        Again with a good step that is discarded after all: a verdict can turn bad, never good. Predicated on an
        accelerator, because reading `bad` would make the host wait.
        """
        nothing = torch.zeros((), dtype=self.c.dtype, device=self.c.device)
        turned = bad if self._verdict is None else bad & ~self._verdict
        if self._rounding is not None:
            kept = self._rounding if self._verdict is None else -self._rounding
            self.c += torch.where(bad if self._verdict is None else ~turned, nothing, kept)
        if turned.device.type != "cpu" or bool(turned):
            # Backwards, so that every sum on the way is one that c has held before: exact, whatever was given back.
            for positions, contribution in reversed(self._sent):
                self.c.index_add_(0, positions, torch.where(turned, contribution, nothing))
            if self._everything is not None:
                self._everything.return_to(self.c, turned)
        # Nobody has looked for an overflow if the exchange broke off before anything was sent.
        drop_if_bad(self.c, turned)
        self._verdict = bad

    def settle_jointly(self, bad: Tensor) -> Joint | None:
        """Leave the verdict to one launch for many accounts; None if `settle` has to apply it."""
        return None

    def accepted(self) -> Tensor:
        """This rank's accepted contribution so far, dense; for tests and measurements."""
        total = torch.zeros_like(self.c)
        for positions, contribution in self._sent:
            total.index_add_(0, positions, contribution)
        if self._everything is not None:
            self._everything.add_to(total)
        return total


def settle_all(accounts: Sequence[Account], bad: Tensor) -> None:
    """Apply a step's verdict to all accounts, in as few launches as possible."""
    together: dict[JointKernel, list[ctypes.Structure]] = {}
    for account in accounts:
        joint = account.settle_jointly(bad)
        if joint is None:
            account.settle(bad)
        else:
            kernel, entry = joint
            together.setdefault(kernel, []).append(entry)
    for kernel, entries in together.items():
        kernel.settle(entries, bad)
