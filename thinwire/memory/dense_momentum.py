"""Momentum of dense slots where a memory owns momentum: applied after averaging, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.compressor import BucketStep, Compressor, GroupStep, Opened
from thinwire.dense_compressor import DenseCompressor
from thinwire.exchange.base import Outcome
from thinwire.kernels.cuda.dense import FusedMomentum
from thinwire.kernels.cuda.joint import Joint
from thinwire.memory.account import Account
from thinwire.memory.base import MemoryState
from thinwire.memory.clip import Clip
from thinwire.memory.store import FlatStore
from thinwire.plan.groups import Group


class DenseMomentumState(MemoryState):
    """Only u; nothing is held back."""

    def __init__(self) -> None:
        self.stores = {"momentum": FlatStore()}

    def compensate(
        self, group: Group, gradients: Sequence[Tensor], scale: Tensor | None
    ) -> DenseMomentumAccount:
        return DenseMomentumAccount(self.stores["momentum"].bind(group).open(scale), None)

    def expect_mean(self, group: Group, scale: Tensor | None) -> DenseMomentumAccount:
        """The same for one that is told the mean; whoever tells it multiplies u."""
        u = self.stores["momentum"].bind(group)
        return DenseMomentumAccount(u.flat, u.retarget(scale))


class DenseMomentumAccount(Account):
    """u changes when the mean is there, and is again what it was if the verdict is bad."""

    def __init__(self, u: Tensor, ratio: Tensor | None) -> None:
        """u times `ratio` is in the units of the gradient."""
        super().__init__(u)
        self._ratio = ratio
        self._before: Tensor | None = None
        self._kernels: FusedMomentum | None = None

    def bank(self, rounding: Tensor) -> None:
        """The rounding of a dense update is not kept, as in every dense step."""

    def accumulate(self, mean: Tensor, momentum: float) -> Tensor:
        """u = m u + mean."""
        self._begin()
        return self.c.mul_(momentum).add_(mean)

    def accumulate_fused(self, kernels: FusedMomentum, bucket_flat: Tensor, wrong: Tensor) -> None:
        """The same for means that lie in the bucket, where the update takes their place."""
        kernels.accumulate(bucket_flat, self.c, self._ratio, wrong)
        self._before, self._kernels = kernels.before, kernels

    def _begin(self) -> Tensor:
        """u in the units of the gradient; returns a copy."""
        if self._ratio is not None:
            self.c.mul_(self._ratio)
        self._before = self.c.clone()
        return self._before

    def settle(self, bad: Tensor) -> None:
        # If the exchange broke off, nothing but the units have changed.
        before = self._begin() if self._before is None else self._before
        self.c.copy_(torch.where(bad, before, self.c))

    def settle_jointly(self, bad: Tensor) -> Joint | None:
        kernels = self._kernels
        return None if kernels is None else (kernels.joint, kernels.trace(self.c))


class DenseMomentumCompressor(Compressor):
    """u = m u + mean gradient; the update is u (Nesterov: mean gradient + m u). The mean is that of plain dense slots."""

    travels_whole = True

    def __init__(
        self, momentum: float, nesterov: bool, wire_dtype: torch.dtype | None, clip: Clip | None
    ) -> None:
        self.memory: DenseMomentumState = DenseMomentumState()
        self.momentum = momentum
        self.nesterov = nesterov
        self.clip = clip
        self._dense = DenseCompressor(wire_dtype)
        self._kernels: WeakKeyDictionary[Group, FusedMomentum] = WeakKeyDictionary()

    def can_be_carried(self, group: Group, dtype: torch.dtype) -> bool:
        return self.clip is None and self._dense.can_be_carried(group, dtype)

    def open_fused(self, step: BucketStep) -> Opened | None:
        """Beside payloads where it is small. None with a clip, which has to look at gradients first."""
        if self.clip is not None:
            return None
        opened = self._dense.open_fused(step)
        assert opened is not None
        return self._with_momentum(opened, step.group, step.scale)

    def open(self, step: GroupStep) -> Opened:
        if self.clip is not None:
            step = self.clip.apply(step)
        return self._with_momentum(self._dense.open(step), step.group, step.scale)

    def _with_momentum(self, opened: Opened, group: Group, scale: Tensor | None) -> Opened:
        """A group whose mean plain dense slots have opened."""
        account = self.memory.expect_mean(group, scale)
        opened.account, opened.complete = account, partial(self._accumulate, account, group)
        return opened

    def _accumulate(self, account: DenseMomentumAccount, group: Group, outcome: Outcome) -> Outcome:
        if outcome.delivered:
            kernels = self._find_kernels(group)
            account.accumulate_fused(kernels, outcome.update, outcome.non_finite)
            return outcome
        mean = outcome.update.to(account.c.dtype)
        u = account.accumulate(mean, self.momentum)
        update = mean.add(u, alpha=self.momentum) if self.nesterov else u
        return Outcome(update, outcome.non_finite)

    def _find_kernels(self, group: Group) -> FusedMomentum:
        kernels = self._kernels.get(group)
        if kernels is None:
            kernels = self._kernels[group] = FusedMomentum(group, self.momentum, self.nesterov)
        return kernels
