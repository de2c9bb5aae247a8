"""Momentum correction: every rank keeps its own momentum, and what is held back has momentum in it already.

Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training" (ICLR 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.kernels.cuda.fused_topk import Correction
from thinwire.kernels.inspection import drop_if_bad
from thinwire.layout import Group
from thinwire.memory.account import Account
from thinwire.memory.base import (
    CORRECTED,
    Memory,
    MemoryState,
    add_gradients,
    sum_with_gradients,
)
from thinwire.memory.storage import STORAGES, make_store
from thinwire.memory.store import Binding, Buffers
from thinwire.validate import check_bool, check_choice, check_finite_number


@dataclass(frozen=True)
class MomentumCorrection(Memory):
    """u = m u + g; v = v + u (Nesterov: v + g + m u); selection chooses from v, and what it sends leaves v.

    With `masking` (momentum factor masking) u is set to 0 wherever v was sent. The optimizer must not apply momentum
    again: `attach(..., optimizer=opt)` takes `momentum` and `nesterov` over from it; they are None until then.
    """

    momentum: float | None = None
    """m; None = taken over from the optimizer."""
    nesterov: bool | None = None
    """Nesterov's form; None = taken over from the optimizer."""
    masking: bool = True
    """Whether u is cleared wherever something was sent."""
    storage: str = "fp32"
    """The format in which u and v are stored: "fp32", "bf16" or "int8" in blocks."""

    form = CORRECTED
    owns_momentum = True

    def __post_init__(self) -> None:
        check_bool("masking", self.masking)
        check_choice("storage", self.storage, STORAGES)
        if self.momentum is not None:
            check_momentum("momentum", self.momentum)
        if self.nesterov is not None:
            check_bool("nesterov", self.nesterov)

    @property
    def masks_momentum(self) -> bool:  # type: ignore[override]
        return self.masking

    @property
    def correction(self) -> Correction | None:
        if self.momentum is None:
            return None
        return Correction(self.momentum, bool(self.nesterov), self.masking)

    def with_momentum(self, momentum: float, nesterov: bool) -> MomentumCorrection:
        """With the optimizer's settings; own settings that differ are refused."""
        for field, own, given in (
            ("momentum", self.momentum, momentum),
            ("nesterov", self.nesterov, nesterov),
        ):
            if own is not None and own != given:
                raise UsageError(
                    f"{field} is {own!r} in MomentumCorrection and {given!r} in the optimizer; leave it out there"
                )
        return replace(self, momentum=momentum, nesterov=nesterov)

    def start(self) -> MemoryState:
        if self.momentum is None:
            raise UsageError(
                "momentum is None; MomentumCorrection takes it over from the optimizer, so pass "
                "attach(..., optimizer=opt)"
            )
        return MomentumState(self)


def check_momentum(field: str, value: float) -> None:
    check_finite_number(field, value)
    if not 0.0 <= value < 1.0:
        raise UsageError(f"{field} is {value!r}; it must be a number in [0, 1)")


class MomentumState(MemoryState):
    """u is the store "momentum"; v is the store "residual", because it is what is held back."""

    setting: MomentumCorrection

    def __init__(self, setting: MomentumCorrection) -> None:
        self.setting = setting
        self.stores = {
            "momentum": make_store(setting.storage),
            "residual": make_store(setting.storage),
        }

    def compensate(
        self, group: Group, gradients: Sequence[Tensor], scale: Tensor | None
    ) -> Account:
        bindings = self.stores["momentum"].bind(group), self.stores["residual"].bind(group)
        u, v = (binding.begin(scale) for binding in bindings)
        accumulate(u, v, group, gradients, self.setting)
        return MomentumAccount(u.now, v.now, bindings, self.setting)


def accumulate(
    u: Buffers,
    v: Buffers,
    group: Group,
    gradients: Sequence[Tensor],
    setting: MomentumCorrection,
    gain: float = 1.0,
) -> None:
    """u = m u + gain x g, and v + u. In the order of torch's SGD, so that with v = 0 and gain 1 the bits are its bits."""
    assert setting.momentum is not None
    torch.mul(u.in_units(), setting.momentum, out=u.now)
    add_gradients(u.now, group, gradients, gain)
    if setting.nesterov:
        sum_with_gradients(v, group, gradients)
        v.now.add_(u.now, alpha=setting.momentum)
    else:
        torch.add(v.in_units(), u.now, out=v.now)


class MomentumAccount(Account):
    """Also masks u when the exchange has ended, and unmasks it if the step turns out bad."""

    def __init__(
        self,
        u: Tensor,
        v: Tensor,
        bindings: tuple[Binding, Binding],
        setting: MomentumCorrection,
    ) -> None:
        super().__init__(v)
        self.u = u
        self.shared_when_dense = [u]
        self._bindings = bindings
        self._setting = setting
        self._resting = False
        self._masked: tuple[Tensor, Tensor, Tensor] | None = None

    def _drop_overflow(self, positions: Tensor, held: Tensor | None) -> None:
        """v is infinite wherever u is, so that what has to go is among the selected."""
        super()._drop_overflow(positions, held)
        self.u[positions] = torch.nan_to_num(self.u[positions], 0.0, 0.0, 0.0)

    def drop_all_overflow(self) -> Tensor:
        overflow = super().drop_all_overflow()
        drop_if_bad(self.u, overflow)
        return overflow

    def rest(self) -> None:
        if self._setting.masking and self._sent and self._masked is None:
            positions = torch.cat([positions for positions, _ in self._sent])
            # What was given back again, and places that carry nothing, were not sent.
            taken = self.accepted()[positions] != 0
            held = self.u[positions]
            self.u[positions] = torch.where(taken, 0.0, held)
            self._masked = (positions, taken, held)
        self._pack(None)

    def _pack(self, flag: Tensor | None) -> None:
        for binding, flat in zip(self._bindings, (self.u, self.c), strict=True):
            if flat.numel():
                binding.rest(flat, flag)
        if self._setting.storage != "fp32":
            self.u, self.c = self.u[:0].clone(), self.c[:0].clone()
            self._resting = True

    def settle(self, bad: Tensor) -> None:
        # With nothing to change, packing once more would only cost time.
        flag = bad if self._resting and self._rounding is None else None
        if flag is not None and bad.device.type == "cpu" and not bool(bad):
            self._verdict = bad
            return
        if self._resting:
            self.u, self.c = (binding.lift(flag) for binding in self._bindings)
        if self._masked is not None:
            positions, taken, held = self._masked
            self.u[positions] = torch.where(taken & bad, held, self.u[positions])
        drop_if_bad(self.u, bad)
        super().settle(bad)
        if self._resting:
            self._pack(flag)
