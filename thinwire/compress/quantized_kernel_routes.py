"""Quantised sums by a few CUDA kernels: what `QuantizedRoute` does in torch, with the same bits.

QuantizedKernelRoute     residual + gradient, or no memory at all
ScaledKernelRoute        with Adam's momentum, in Adam's scale
RefreshingKernelRoute    the same in a step in which the scale learns from the mean gradient first
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.compress.base import GroupStep, Opened
from thinwire.compress.kernel_accounts import TakeBackAccount
from thinwire.compress.quantized_routes import SumRoute
from thinwire.compress.quantized_sums import add_up
from thinwire.compress.refresh import MeanGradient
from thinwire.exchange.base import Outcome
from thinwire.exchange.quantized import QuantizedSum
from thinwire.exchange.requests import Program
from thinwire.kernels.cuda.joint import Joint
from thinwire.kernels.cuda.quantize import QuantizedKernels, SentCodes
from thinwire.memory.adam import SECOND_MOMENT
from thinwire.memory.base import MemoryState
from thinwire.memory.store import Binding, Buffers
from thinwire.wire.codec import Flags


class QuantizedKernelRoute(SumRoute):
    """The gradient, with the residual if there is one."""

    backend = "CUDA kernels"

    def __init__(
        self,
        sum_: QuantizedSum,
        memory: MemoryState,
        mean_gradient: MeanGradient,
        kernels: QuantizedKernels,
    ) -> None:
        super().__init__(sum_, memory, mean_gradient)
        self.kernels = kernels
        self.residual = memory.stores.get("residual")

    def open(self, step: GroupStep) -> Opened:
        kernels, flat = self.kernels, step.bucket_flat
        sent = kernels.begin(step.counts)
        if self.residual is None:
            kernels.send(sent, flat, kernels.never, kernels.never, None)
            return Opened(self._exchange(sent, None, flat))
        binding = self.residual.bind(self.group)
        buffers = binding.begin(step.scale)
        kernels.send(sent, flat, *buffers)
        account = QuantizedKernelAccount(buffers.now, [binding], self, sent)
        return Opened(self._exchange(sent, account, flat), account)

    def _exchange(
        self, sent: SentCodes, account: QuantizedKernelAccount | None, flat: Tensor
    ) -> Program[Outcome]:
        """What follows when a rank's codes are written."""
        kernels, group = self.kernels, self.group
        memory = kernels.never if account is None else account.c
        gathered = yield from add_up(self.sum, kernels, sent, memory)
        out = flat
        if not kernels.into_bucket:
            out = torch.zeros(group.numel, device=group.device)
        kernels.deliver(gathered, sent, out)
        if account is not None:
            account.arrive()
        return Outcome(out, kernels.wrong, delivered=kernels.into_bucket)


class ScaledKernelRoute(QuantizedKernelRoute):
    """Momentum and residual, quantised in units of sqrt(v) + eps."""

    def open(self, step: GroupStep) -> Opened:
        kernels, flat = self.kernels, step.bucket_flat
        bindings, c, momentum = self._begin(step)
        sent = kernels.begin(step.counts, step.scale)
        sent.second_moment = self._second_moment()
        kernels.send(sent, flat, *c, momentum)
        account = QuantizedKernelAccount(c.now, bindings, self, sent, momentum)
        return Opened(self._exchange(sent, account, flat), account)

    def _begin(self, step: GroupStep) -> tuple[list[Binding], Buffers, list[Tensor]]:
        """(the bindings of residual and momentum, the residual's buffers, what kernels are told of the momentum)."""
        bindings = [self.memory.stores[name].bind(self.group) for name in ("residual", "momentum")]
        c, u = (binding.begin(step.scale) for binding in bindings)
        return bindings, c, self.kernels.open_momentum(*u)

    def _second_moment(self) -> Tensor:
        return self.memory.stores[SECOND_MOMENT].bind(self.group).flat


class RefreshingKernelRoute(ScaledKernelRoute):
    """c is collected first, and sent when the mean gradient has changed v."""

    def __init__(
        self,
        sum_: QuantizedSum,
        memory: MemoryState,
        mean_gradient: MeanGradient,
        kernels: QuantizedKernels,
    ) -> None:
        super().__init__(sum_, memory, mean_gradient, kernels)
        self.objection = mean_gradient.objection

    def open(self, step: GroupStep) -> Opened:
        bindings, c, momentum = self._begin(step)
        sent = self.kernels.begin(step.counts, step.scale)
        self.kernels.collect(sent, step.bucket_flat, *c, momentum)
        account = QuantizedKernelAccount(c.now, bindings, self, None, momentum)
        return Opened(self._refresh(sent, account, step), account)

    def _refresh(
        self, sent: SentCodes, account: QuantizedKernelAccount, step: GroupStep
    ) -> Program[Outcome]:
        flags, flat = Flags(*self.kernels.raised(sent)), step.bucket_flat
        pieces = self.group.pieces(flat)
        flags = yield from self.mean_gradient.run(pieces, flags, step.counts, step.scale)
        self.kernels.raise_non_finite(sent, flags.non_finite)
        sent.second_moment = self._second_moment()
        self.kernels.send_collected(sent, account.c)
        account.sent = sent
        outcome: Outcome = yield from self._exchange(sent, account, flat)
        return outcome


class QuantizedKernelAccount(TakeBackAccount):
    """What was sent is known by its codes, and a rank's own blocks are kept as they were until the verdict."""

    def __init__(
        self,
        c: Tensor,
        bindings: Sequence[Binding],
        route: QuantizedKernelRoute,
        sent: SentCodes | None,
        momentum: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(c, bindings, route.kernels, momentum)
        self.sent = sent
        """None before anything is."""
        self._route = route

    def _joint_entry(self, used: Tensor) -> Joint | None:
        if self.sent is None:
            return None
        return self._route.kernels.joint_entry(self.c, self.sent, used, self._unused)

    def _give_back(self, used: Tensor, bad: Tensor) -> None:
        if self.sent is not None:
            self._route.kernels.give_back(self.c, self.sent, used, bad, self._unused)

    def accepted(self) -> Tensor:
        sum_ = self._route.sum
        total = torch.zeros(self._route.group.numel, device=self.c.device)
        if self.sent is None:
            return total
        _, coded = sum_.offer.read(self.sent.offer)
        divisor = self._route.memory.divisor(self._route.group, None)
        divisors = None if divisor is None else sum_.owned.cut(divisor.flat)
        values = sum_.quantizer.decode(coded, divisors)
        own = self.sent.own.view(values.shape[1:])
        if self.used is None:
            values[sum_.peer] = own
        else:
            # So that c and what was accepted are together what memory handed out.
            self._return_unused()
            values[sum_.peer] = own - sum_.owned.cut(self.c, [sum_.owner])[0]
            taken = self.used[sum_.owned.slots.long()].bool()
            values = torch.where(taken[..., None], values, 0.0)
        sum_.owned.write(values, total)
        return total
