"""Error feedback: c = beta x residual + gamma x gradient, residual = c - what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.layout import Group
from thinwire.memory.account import Account
from thinwire.memory.base import RESIDUAL, Memory, MemoryState, add_gradients, sum_with_gradients
from thinwire.memory.storage import STORAGES, PackedAccount, make_store
from thinwire.validate import check_choice, check_finite_number


@dataclass(frozen=True)
class Residual(Memory):
    """Residual memory. beta and gamma weigh the old residual and the new gradient.

    `storage` is the format in which it rests: "fp32", "bf16" (half the bytes) or "int8" in blocks (a quarter). The
    narrow ones round what is held back, stochastically, and that much is lost per step.
    """

    beta: float = 1.0
    """Weight of the old residual."""
    gamma: float = 1.0
    """Weight of the new gradient."""
    storage: str = "fp32"
    """The format in which it is stored."""

    def __post_init__(self) -> None:
        check_choice("storage", self.storage, STORAGES)
        check_finite_number("beta", self.beta)
        check_finite_number("gamma", self.gamma)

    @property
    def form(self) -> str | None:  # type: ignore[override]
        return RESIDUAL if (self.beta, self.gamma) == (1.0, 1.0) else None

    def start(self) -> MemoryState:
        return ResidualState(self)


class ResidualState(MemoryState):
    setting: Residual

    def __init__(self, setting: Residual) -> None:
        self.setting = setting
        self.stores = {"residual": make_store(setting.storage)}

    def compensate(
        self, group: Group, gradients: Sequence[Tensor], scale: Tensor | None
    ) -> Account:
        """The residual's buffer holds c, and sending takes out of it again."""
        binding = self.stores["residual"].bind(group)
        buffers = binding.begin(scale)
        if self.setting.beta != 1.0:
            c = buffers.brought().mul_(self.setting.beta)
            add_gradients(c, group, gradients, self.setting.gamma)
        else:
            c = sum_with_gradients(buffers, group, gradients, self.setting.gamma)
        return Account(c) if self.setting.storage == "fp32" else PackedAccount(c, binding)


@dataclass(frozen=True)
class NoMemory(Memory):
    """Nothing is held back: what is not selected is lost. Lossy by design."""

    keeps_state = False

    def start(self) -> MemoryState:
        return NoMemoryState(self)


class NoMemoryState(MemoryState):
    def __init__(self, setting: Memory) -> None:
        self.setting = setting
        self.stores = {}

    def compensate(
        self, group: Group, gradients: Sequence[Tensor], scale: Tensor | None
    ) -> Account:
        c = torch.zeros(group.numel, dtype=group.dtype, device=group.device)
        add_gradients(c, group, gradients)
        return Account(c)
