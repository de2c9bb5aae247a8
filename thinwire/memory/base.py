"""The contract of a memory: what was not sent last time comes back.

A `Memory` is a frozen setting; its state lives in the `MemoryState` that `start()` returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.forms import Formed
from thinwire.kernels.cuda.fused_topk import Correction
from thinwire.kernels.cuda.quantize import Scaling
from thinwire.kernels.journal import Journal
from thinwire.layout import Group
from thinwire.memory.account import Account
from thinwire.memory.refresh import Refresh
from thinwire.memory.store import Buffers, FlatStore
from thinwire.select.scaled import Divisor

RESIDUAL = "residual + gradient"
"""The form of a memory with one store, "residual", whose sum with the gradient is what selection chooses from."""
CORRECTED = "momentum correction"
"""The form of a memory with the stores "momentum" and "residual" and a `correction`."""
SCALED = "momentum in Adam's scale"
"""The form of a memory with the stores "momentum", "residual" and "second_moment" and a `scaling`."""


class Memory(Formed, ABC):
    """A frozen description of a memory."""

    computed_by = ("start",)

    keeps_state: bool = True
    """Whether anything is held back between steps."""
    owns_momentum: bool = False
    """Whether momentum is applied here, so that the optimizer must not apply it again."""
    masks_momentum: bool = False
    """Whether momentum is cleared wherever something was sent."""

    def with_momentum(self, momentum: float, nesterov: bool) -> Memory:
        """The same memory with what was taken over from the optimizer; one that owns no momentum stays as it is."""
        return self

    @property
    def correction(self) -> Correction | None:
        """How momentum is applied before anything is held back; None where it is not, or not known yet."""
        return None

    @property
    def scaling(self) -> Scaling | None:
        """In which scale of an optimizer's what is sent is chosen or rounded; None where in none, or not known yet."""
        return None

    @abstractmethod
    def start(self) -> MemoryState: ...


class Stores:
    """What is kept between steps, for all parameters that share it: named buffers by parameter name."""

    stores: dict[str, FlatStore]
    needs_journal: ClassVar[bool] = False
    """Whether a bad step, if it changed memory in place, would leave what is not finite there."""

    def keep_journal(self, journal: Journal) -> None:
        """Note there what steps change, so that one that is skipped leaves no trace. Called before the first step."""
        for store in self.stores.values():
            store.journal = journal

    def release(self, names: Sequence[str]) -> None:
        for store in self.stores.values():
            store.release(names)

    def nbytes(self) -> int:
        return sum(store.nbytes() for store in self.stores.values())


class MemoryState(Stores, ABC):
    """A memory at work, for all parameters that use it."""

    setting: Memory

    @abstractmethod
    def compensate(
        self, group: Group, gradients: Sequence[Tensor], scale: Tensor | None
    ) -> Account:
        """Open the step's account: c = what selection is to choose from.

        `gradients` are finite, one 1-D piece per slot in memory order, in units of `scale`.
        """

    def due(self, names: Sequence[str], counts: Sequence[int]) -> Refresh | None:
        """The refresh of the divisor that the next exchange of some parameters brings; the same on all ranks.

        Each of them was exchanged `counts` times before.
        """
        return None

    def refresh(self, group: Group, mean: Tensor, counts: Sequence[int]) -> None:
        """Learn from the mean gradient over all ranks, flat and in plain units, that a refresh was due for."""
        raise NotImplementedError

    def divisor(self, group: Group, scale: Tensor | None) -> Divisor | None:
        """What selection divides c by before it compares magnitudes; None = nothing."""
        return None


def add_gradients(
    flat: Tensor, group: Group, gradients: Sequence[Tensor], gamma: float = 1.0
) -> None:
    """flat += gamma x gradient for every slot, in one multi-tensor call."""
    if not gradients:
        return
    targets = group.spans(flat)
    sources = [gradient.to(flat.dtype) for gradient in gradients]
    torch._foreach_add_(targets, sources, alpha=gamma)


def sum_with_gradients(
    buffers: Buffers, group: Group, gradients: Sequence[Tensor], gamma: float = 1.0
) -> Tensor:
    """held x ratio + gamma x gradient for every slot, in `now`."""
    held, now, ratio = buffers
    if now is not held and ratio is None and now.device.type == "cpu":
        # One pass. Between the slots both buffers are zero.
        spans = zip(group.spans(held), gradients, group.spans(now), strict=True)
        for old, gradient, new in spans:
            torch.add(old, gradient.to(now.dtype), alpha=gamma, out=new)
        return now
    flat = buffers.brought()
    add_gradients(flat, group, gradients, gamma)
    return flat
