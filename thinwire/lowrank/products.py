"""Products: who multiplies a group's matrices in one step."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from thinwire.exchange.base import Outcome
from thinwire.lowrank.account import LowRankAccount, Sent
from thinwire.lowrank.basis import exact_products
from thinwire.lowrank.layout import FactorLayout, Factors
from thinwire.lowrank.memory import LowRankMemory
from thinwire.lowrank.summing import Summed
from thinwire.wire.codec import Flags


class Products(ABC):
    """The arithmetic between the sums over ranks. The first buffer of a step has flags behind the factors.

    Flags survive a sum: a slot had a gradient if any rank added 1, and NaN marks a bad step.
    """

    def __init__(
        self, account: LowRankAccount, memory: LowRankMemory, slots: int, world: int
    ) -> None:
        self.account = account
        self.memory = memory
        self.slots = slots
        self.world = world
        self.had: Tensor | None = None
        """float [slots]: how many ranks had a gradient, once the first sum is there."""

    @property
    def control(self) -> int:
        """How many numbers beside the factors travel once per step."""
        return self.slots + 1

    @abstractmethod
    def project(self, sent: FactorLayout, known: Factors, *, first: bool) -> Tensor:
        """c x basis, or c^T x basis, of every matrix in one buffer. The first of a step has the flags too."""

    def receive(self, total: Tensor, *, first: bool) -> None:
        """Take note of a sum before it is used."""
        if first:
            self.had = total[-self.control : -1]

    @abstractmethod
    def orthogonalise(self, layout: FactorLayout, total: Tensor) -> Tensor:
        """Bases of what was received, in the same layout."""

    @abstractmethod
    def deliver(self, sent: FactorLayout, known: Factors, summed: Summed) -> Outcome:
        """The mean update out of the summed factors; the account learns what this rank sent."""


class TorchProducts(Products):
    """In torch, matrices of one shape together."""

    def __init__(
        self,
        account: LowRankAccount,
        memory: LowRankMemory,
        slots: int,
        world: int,
        flags: Flags,
        divisor: Tensor | None = None,
    ) -> None:
        """With a `divisor` (positive, flat as memory is) c / divisor is multiplied, and what is delivered is in its units again."""
        super().__init__(account, memory, slots, world)
        self._divisor = divisor
        self._given = account.c if divisor is None else account.c / divisor
        self._flags = flags
        self._received: list[Tensor] = []

    def project(self, sent: FactorLayout, known: Factors, *, first: bool) -> Tensor:
        c = self.account.c
        buffer = torch.empty(
            sent.numel + (self.control if first else 0), dtype=c.dtype, device=c.device
        )
        if first:
            buffer[sent.numel : -1] = self._flags.had_gradient
            buffer[-1] = torch.where(self._flags.non_finite, torch.nan, 0.0)
        with exact_products(c.device):
            for batch, side, basis, out in zip(
                sent.batches, sent.sides, known.sections, sent.sections(buffer), strict=True
            ):
                batch.multiply(self._given, basis, side, out)
        return buffer

    def receive(self, total: Tensor, *, first: bool) -> None:
        super().receive(total, first=first)
        self._received.append(total)

    def orthogonalise(self, layout: FactorLayout, total: Tensor) -> Tensor:
        return layout.orthogonalise(total)

    def deliver(self, sent: FactorLayout, known: Factors, summed: Summed) -> Outcome:
        c = self.account.c
        assert self.had is not None and summed.part is not None
        # What no matrix covers is padding, and has to be the same everywhere.
        update = torch.empty_like(c) if sent.covered == c.numel() else torch.zeros_like(c)
        weights = sent.spread(self.had.clamp(max=1 / self.world))
        mean = weights.mul_(summed.total[: sent.numel])
        with exact_products(c.device):
            for batch, side, factor, basis in zip(
                sent.batches, sent.sides, sent.sections(mean), known.sections, strict=True
            ):
                p, q = (factor, basis) if side == "p" else (basis, factor)
                batch.rebuild(update, p, q)
        if self._divisor is not None:
            update.mul_(self._divisor)
        part, renewed = summed.part[: sent.numel], sent.orthogonalise(mean)
        self.account.sent = Sent(
            sent, part, known, renewed, self.had, self.memory, divisor=self._divisor
        )
        return Outcome(update, ~are_finite(self._received))


def are_finite(buffers: list[Tensor]) -> Tensor:
    """bool []"""
    largest = torch.linalg.vector_norm(buffers[0], torch.inf)
    for buffer in buffers[1:]:
        largest = torch.maximum(largest, torch.linalg.vector_norm(buffer, torch.inf))
    return largest < torch.inf
