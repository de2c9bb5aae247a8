"""FlushCompressor: what is held back of a slot that turns dense is sent once, densely, so that nothing is lost."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from thinwire.compress.base import Compressor, GroupPlan, GroupStep, Opened, Route, Terms
from thinwire.exchange.base import Outcome
from thinwire.exchange.requests import Place, Program, Sum
from thinwire.exchange.sums import dense_mean
from thinwire.kernels.inspection import inspect
from thinwire.layout import Group
from thinwire.memory.account import Account
from thinwire.memory.base import MemoryState
from thinwire.wire.codec import Flags


class FlushCompressor(Compressor):
    """Sends gradient + memory. Slots no rank had a gradient for get no update and wait for the next step."""

    def __init__(self, memory: MemoryState) -> None:
        self.memory: MemoryState = memory

    def plan(self, group: Group, terms: Terms) -> GroupPlan:
        return FlushPlan(group, self.memory, terms.place)


class FlushPlan(GroupPlan):
    def __init__(self, group: Group, memory: MemoryState, place: Place) -> None:
        super().__init__(group)
        self._memory = memory
        self._place = place

    def route(self, modes: Hashable) -> Route:
        return FlushRoute(self.group, self._memory, self._place)


class FlushRoute(Route):
    compressed = False

    def __init__(self, group: Group, memory: MemoryState, place: Place) -> None:
        share = 2 * (place.world - 1) / place.world * group.dtype.itemsize
        entries = [slot.numel for slot in group.slots]
        super().__init__(group, [share * numel for numel in entries], entries)
        self.memory = memory
        self.place = place

    def open(self, step: GroupStep) -> Opened:
        flags, gradients = inspect(self.group, step.bucket_flat)
        inner = self.memory.compensate(self.group, gradients, step.scale)
        account = FlushAccount(inner, self.group)
        return Opened(self._run(flags, account), account)

    def _run(self, flags: Flags, account: FlushAccount) -> Program[Outcome]:
        had = flags.had_gradient.to(account.c.dtype)
        poison = torch.where(flags.non_finite, torch.nan, 0.0).to(account.c.dtype)
        buffer = torch.cat([account.c, poison[None]])
        mean = yield from dense_mean(buffer, self.place, phase="flush")
        if self.place.world > 1:
            (had,) = yield (Sum(had, "flush/had", control_bytes=had.nbytes),)
        account.used = had > 0
        for shared in account.memory.shared_when_dense:
            averaged = yield from dense_mean(shared.clone(), self.place, phase="flush/momentum")
            shared.copy_(averaged)
        for index, slot in enumerate(self.group.slots):
            piece = slot.span(mean)
            piece.copy_(torch.where(account.used[index], piece, 0.0))
        return Outcome(mean[:-1], ~mean[-1].isfinite())


class FlushAccount(Account):
    """Memory empties only when the step turns out good and the slot's update was used.

    What the cast of the update to a narrower gradient dtype loses is not kept, as in every dense step.
    """

    def __init__(self, memory: Account, group: Group) -> None:
        super().__init__(memory.c)
        self.memory = memory
        self.group = group
        self.used = torch.zeros(len(group.slots), dtype=torch.bool, device=memory.c.device)
        self.flushed = self.used
        self._held: Tensor | None = None

    def bank(self, rounding: Tensor) -> None:
        """There will be no memory to keep it in."""

    def settle(self, bad: Tensor) -> None:
        if self._held is None:
            # A sum of finite numbers can overflow; nothing of that may stay.
            self._held = torch.nan_to_num(self.c, 0.0, 0.0, 0.0)
        self.flushed = self.used & ~bad
        for index, slot in enumerate(self.group.slots):
            kept = torch.where(self.flushed[index], 0.0, slot.span(self._held))
            slot.span(self.c).copy_(kept)
        self.memory.c = self.c
        self.memory.rest()
