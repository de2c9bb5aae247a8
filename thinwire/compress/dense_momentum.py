"""Momentum of dense slots where a memory owns momentum: applied after averaging, the same on every rank."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.compress.dense import AfterMean, MeanStep
from thinwire.exchange.base import Outcome
from thinwire.kernels.cuda.dense import FusedMomentum
from thinwire.layout import Group
from thinwire.memory.account import Account
from thinwire.memory.base import Stores
from thinwire.memory.store import Buffers, FlatStore


class MomentumAfterMean(AfterMean):
    """u = m u + mean gradient; the update is u (Nesterov: mean gradient + m u)."""

    takes_delivered = True

    def __init__(self, momentum: float, nesterov: bool) -> None:
        self.memory: OnlyMomentum = OnlyMomentum()
        self.momentum = momentum
        self.nesterov = nesterov
        self._kernels: WeakKeyDictionary[Group, FusedMomentum] = WeakKeyDictionary()

    def begin(self, group: Group, scale: Tensor | None) -> MeanStep:
        buffers = self.memory.stores["momentum"].bind(group).begin(scale)
        return MomentumStep(self, group, buffers)

    def kernels(self, group: Group) -> FusedMomentum:
        found = self._kernels.get(group)
        if found is None:
            found = self._kernels[group] = FusedMomentum(group, self.momentum, self.nesterov)
        return found


class OnlyMomentum(Stores):
    """Only u, in the store "momentum"; nothing is held back.

    A mean that is not finite is in u before anybody knows of it, so that every bad step has to be taken back.
    """

    needs_journal = True

    def __init__(self) -> None:
        self.stores = {"momentum": FlatStore()}


class MomentumStep(MeanStep):
    def __init__(self, setting: MomentumAfterMean, group: Group, buffers: Buffers) -> None:
        self.account = DenseMomentumAccount(buffers.now)
        self._setting = setting
        self._group = group
        self._buffers = buffers

    def finish(self, outcome: Outcome) -> Outcome:
        setting, buffers = self._setting, self._buffers
        if outcome.delivered:
            kernels = setting.kernels(self._group)
            kernels.accumulate(outcome.update, *buffers, outcome.non_finite)
            return outcome
        mean = outcome.update.to(buffers.now.dtype)
        u = torch.mul(buffers.in_units(), setting.momentum, out=buffers.now).add_(mean)
        update = mean.add(u, alpha=setting.momentum) if setting.nesterov else u
        return Outcome(update, outcome.non_finite)


class DenseMomentumAccount(Account):
    """u changes when the mean is there. Nothing was sent that could come back."""

    def bank(self, rounding: Tensor) -> None:
        """The rounding of a dense update is not kept, as in every dense step."""

    def settle(self, bad: Tensor) -> None:
        """The journal has what u was."""
