"""The contract of a memory: what was not sent last time comes back.

A `Memory` is a frozen setting; its state lives in the `MemoryState` that `start()` returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.memory.account import Account
from thinwire.memory.store import FlatStore
from thinwire.plan.groups import Group


class Memory(ABC):
    """A frozen description of a memory."""

    keeps_state: bool = True
    """Whether anything is held back between steps."""
    owns_momentum: bool = False
    """Whether momentum is applied here, so that the optimizer must not apply it again."""

    @abstractmethod
    def start(self) -> MemoryState: ...


class MemoryState(ABC):
    """A memory at work, for all parameters that use it."""

    stores: dict[str, FlatStore]
    """Named buffers by parameter name; what `state_dict` saves."""

    @abstractmethod
    def compensate(
        self, group: Group, gradients: Sequence[Tensor], scale: Tensor | None
    ) -> Account:
        """Open the step's account: c = what selection is to choose from.

        `gradients` are finite, one 1-D piece per slot in memory order, in units of `scale`.
        """

    def update(self, account: Account, positions: Tensor, contribution: Tensor) -> None:
        """What the papers call memory.update: the residual is what was not sent."""
        account.write_off(positions, contribution)

    def release(self, names: Sequence[str]) -> None:
        for store in self.stores.values():
            store.release(names)

    def nbytes(self) -> int:
        return sum(store.nbytes() for store in self.stores.values())


def add_gradients(
    flat: Tensor, group: Group, gradients: Sequence[Tensor], gamma: float = 1.0
) -> None:
    """flat += gamma x gradient for every slot, in one multi-tensor call."""
    if not gradients:
        return
    targets = group.spans(flat)
    sources = [gradient.to(flat.dtype) for gradient in gradients]
    torch._foreach_add_(targets, sources, alpha=gamma)
