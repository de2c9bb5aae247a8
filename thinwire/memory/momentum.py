"""Momentum correction: every rank keeps its own momentum, and what is held back has momentum in it already.

Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training" (ICLR 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.memory.account import Account
from thinwire.memory.base import Memory, MemoryState, add_gradients
from thinwire.memory.storage import STORAGES, make_store
from thinwire.memory.store import Binding
from thinwire.plan.groups import Group
from thinwire.validate import check_bool, check_choice, check_finite_number


@dataclass(frozen=True)
class MomentumCorrection(Memory):
    """u = m u + g; v = v + u (Nesterov: v + g + m u); selection chooses from v, and what it sends leaves v.

    With `masking` (momentum factor masking) u is set to 0 wherever v was sent. The optimizer must not apply momentum
    again: `attach(..., optimizer=opt)` takes `momentum` and `nesterov` over from it; they are None until then.
    """

    momentum: float | None = None
    nesterov: bool | None = None
    masking: bool = True
    storage: str = "fp32"

    owns_momentum = True

    def __post_init__(self) -> None:
        check_bool("masking", self.masking)
        check_choice("storage", self.storage, STORAGES)
        if self.momentum is not None:
            check_momentum("momentum", self.momentum)
        if self.nesterov is not None:
            check_bool("nesterov", self.nesterov)

    def bound(self, momentum: float, nesterov: bool) -> MomentumCorrection:
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

    def __init__(self, setting: MomentumCorrection) -> None:
        self.setting = setting
        self.stores = {
            "momentum": make_store(setting.storage),
            "residual": make_store(setting.storage),
        }

    def compensate(
        self, group: Group, gradients: Sequence[Tensor], scale: Tensor | None
    ) -> Account:
        u_binding = self.stores["momentum"].bind(group)
        v_binding = self.stores["residual"].bind(group)
        u, v = u_binding.open(scale), v_binding.open(scale)
        accumulate(u, v, group, gradients, self.setting)
        return MomentumAccount(u, v, (u_binding, v_binding), self.setting)


def accumulate(
    u: Tensor, v: Tensor, group: Group, gradients: Sequence[Tensor], setting: MomentumCorrection
) -> None:
    """In the order of torch's SGD, so that with v = 0 the bits are its bits."""
    assert setting.momentum is not None
    u.mul_(setting.momentum)
    add_gradients(u, group, gradients)
    if setting.nesterov:
        add_gradients(v, group, gradients)
        v.add_(u, alpha=setting.momentum)
    else:
        v.add_(u)


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
        super().settle(bad)
        if self._resting:
            self._pack(flag)
