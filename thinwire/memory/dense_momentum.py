"""Momentum of dense slots where a memory owns momentum: applied after averaging, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.compressor import BucketStep, Compressor, GroupStep, Opened
from thinwire.dense_compressor import DenseCompressor
from thinwire.exchange.base import Outcome
from thinwire.exchange.dense import dense_mean
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
    """u = m u + mean gradient; the update is u (Nesterov: mean gradient + m u)."""

    def __init__(
        self, momentum: float, nesterov: bool, wire_dtype: torch.dtype | None, clip: Clip | None
    ) -> None:
        self.memory: MemoryState = DenseMomentumState()
        self.momentum = momentum
        self.nesterov = nesterov
        self.wire_dtype = wire_dtype
        self.clip = clip
        self._dense = DenseCompressor(wire_dtype)

    def open_fused(self, step: BucketStep) -> Opened | None:
        """The mean as plain dense slots have it, beside payloads where it is small; clipping has to look at gradients first."""
        if self.clip is not None:
            return None
        opened = self._dense.open_fused(step)
        assert opened is not None
        u = self.memory.stores["momentum"].bind(step.group).open(step.scale)
        account = DenseMomentumAccount(u)
        program = self._run_fused(opened.program, step, account)
        return replace(opened, program=program, account=account)

    def _run_fused(
        self, means: Program[Outcome], step: BucketStep, account: DenseMomentumAccount
    ) -> Program[Outcome]:
        outcome = yield from means
        if outcome.delivered:
            mean = torch.zeros_like(account.c)
            torch._foreach_copy_(step.group.spans(mean), step.group.pieces(step.bucket_flat))
        else:
            mean = outcome.update.to(account.c.dtype)
        return Outcome(self._accumulate(account, mean), outcome.non_finite)

    def _accumulate(self, account: DenseMomentumAccount, mean: Tensor) -> Tensor:
        """The update."""
        account.after = account.c * self.momentum + mean
        return mean.add(account.after, alpha=self.momentum) if self.nesterov else account.after

    def open(self, step: GroupStep) -> Opened:
        if self.clip is not None:
            step = self.clip.apply(step)
        account = self.memory.compensate(step.group, step.gradients, step.scale)
        assert isinstance(account, DenseMomentumAccount)
        dtype = self.wire_dtype or step.gradients[0].dtype
        world = step.place.world
        slot_bytes = [
            2 * (world - 1) / world * slot.numel * dtype.itemsize for slot in step.group.slots
        ]
        entries = [slot.numel for slot in step.group.slots]
        program = self._run(step, account, dtype)
        return Opened(program, account, slot_bytes, entries, compressed=False)

    def _run(
        self, step: GroupStep, account: DenseMomentumAccount, dtype: torch.dtype
    ) -> Program[Outcome]:
        buffer = torch.zeros(step.group.numel, dtype=dtype, device=step.group.device)
        torch._foreach_copy_([slot.span(buffer) for slot in step.group.slots], list(step.gradients))
        # The pipeline zeroed what was not finite; a NaN in its place travels by the sum.
        buffer[:1] += torch.where(step.flags.non_finite, torch.nan, 0.0)
        mean = yield from dense_mean(
            buffer, step.place, deterministic=step.deterministic, phase="dense"
        )
        update = self._accumulate(account, mean.to(account.c.dtype))
        return Outcome(update, ~mean[0].isfinite())
