"""Momentum of dense slots where a memory owns momentum: applied after averaging, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.compressor import BucketStep, Compressor, GroupStep, Opened
from thinwire.dense_compressor import DenseCompressor
from thinwire.exchange.base import Outcome
from thinwire.exchange.requests import Program
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
    ) -> Account:
        return DenseMomentumAccount(self.stores["momentum"].bind(group).open(scale))


class DenseMomentumAccount(Account):
    """u changes only when the verdict is good."""

    def __init__(self, u: Tensor) -> None:
        super().__init__(u)
        self._before = u.clone()
        self.after = u

    def bank(self, rounding: Tensor) -> None:
        """The rounding of a dense update is not kept, as in every dense step."""

    def settle(self, bad: Tensor) -> None:
        self.c.copy_(torch.where(bad, self._before, self.after))


class DenseMomentumCompressor(Compressor):
    """u = m u + mean gradient; the update is u (Nesterov: mean gradient + m u). The mean is that of plain dense slots."""

    travels_whole = True

    def __init__(
        self, momentum: float, nesterov: bool, wire_dtype: torch.dtype | None, clip: Clip | None
    ) -> None:
        self.memory: MemoryState = DenseMomentumState()
        self.momentum = momentum
        self.nesterov = nesterov
        self.clip = clip
        self._dense = DenseCompressor(wire_dtype)

    def open_fused(self, step: BucketStep) -> Opened | None:
        """Beside payloads where it is small. None with a clip, which has to look at gradients first."""
        if self.clip is not None:
            return None
        opened = self._dense.open_fused(step)
        assert opened is not None
        return self._with_momentum(opened, step.group, step.scale, step.bucket_flat)

    def open(self, step: GroupStep) -> Opened:
        if self.clip is not None:
            step = self.clip.apply(step)
        return self._with_momentum(self._dense.open(step), step.group, step.scale, None)

    def _with_momentum(
        self, opened: Opened, group: Group, scale: Tensor | None, bucket_flat: Tensor | None
    ) -> Opened:
        """A group whose mean plain dense slots have opened."""
        account = self.memory.compensate(group, (), scale)
        assert isinstance(account, DenseMomentumAccount)
        program = self._accumulate(opened.program, account, group, bucket_flat)
        return replace(opened, program=program, account=account)

    def _accumulate(
        self,
        means: Program[Outcome],
        account: DenseMomentumAccount,
        group: Group,
        bucket_flat: Tensor | None,
    ) -> Program[Outcome]:
        outcome = yield from means
        if outcome.delivered:
            assert bucket_flat is not None
            mean = torch.zeros_like(account.c)
            torch._foreach_copy_(group.spans(mean), group.pieces(bucket_flat))
        else:
            mean = outcome.update.to(account.c.dtype)
        account.after = account.c * self.momentum + mean
        update = mean.add(account.after, alpha=self.momentum) if self.nesterov else account.after
        return Outcome(update, outcome.non_finite)
