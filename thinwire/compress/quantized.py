"""QuantizedCompressor: memory -> blocks of small codes -> sums at their owners."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from thinwire.compress.base import (
    BUCKET_ALIGNMENT,
    Compressor,
    GroupPlan,
    GroupStep,
    Opened,
    Route,
    Terms,
)
from thinwire.compress.kernel_accounts import TakeBackAccount
from thinwire.compress.refresh import MeanGradient
from thinwire.exchange.base import Outcome
from thinwire.exchange.quantized import QuantizedSum
from thinwire.exchange.requests import Place, Program
from thinwire.kernels.cuda.joint import Joint
from thinwire.kernels.cuda.quantize import BLOCKS, QuantizedKernels, SentCodes
from thinwire.kernels.cuda.source import FLOAT_CODES
from thinwire.kernels.cuda.toolchain import has_kernels
from thinwire.kernels.inspection import drop_if_bad, inspect
from thinwire.layout import Group
from thinwire.memory.account import Account
from thinwire.memory.base import RESIDUAL, Memory, MemoryState
from thinwire.memory.refresh import Refresh
from thinwire.memory.store import Binding
from thinwire.wire.codec import Flags
from thinwire.wire.quantize import BlockQuantizer


class QuantizedCompressor(Compressor):
    """Everything is sent, in a few bits; what these leave of c is the residual."""

    def __init__(
        self,
        quantizer: BlockQuantizer,
        block: int,
        memory: Memory,
        *,
        stochastic: bool,
        per_host: int = 1,
        sum_quantizer: BlockQuantizer | None = None,
    ) -> None:
        self.quantizer = quantizer
        self.sum_quantizer = sum_quantizer
        self.block = block
        self.memory: MemoryState = memory.start()
        self.stochastic = stochastic
        self.per_host = per_host

    def sum(self, group: Group, place: Place) -> QuantizedSum:
        return QuantizedSum(
            group,
            place,
            self.quantizer,
            self.block,
            stochastic=self.stochastic,
            per_host=self.per_host,
            sum_quantizer=self.sum_quantizer,
        )

    def plan(self, group: Group, terms: Terms) -> GroupPlan:
        return QuantizedPlan(self, group, terms)


class QuantizedPlan(GroupPlan):
    """A group whose route is the same in every step, but for refreshes of its memory's divisor."""

    def __init__(self, compressor: QuantizedCompressor, group: Group, terms: Terms) -> None:
        super().__init__(group)
        self._compressor = compressor
        self._terms = terms
        self._names = [slot.name for slot in group.slots]

    def begin(self, counts: Sequence[int]) -> Hashable:
        return self._compressor.memory.due(self._names, counts)

    def route(self, modes: Hashable) -> Route:
        compressor, terms = self._compressor, self._terms
        assert modes is None or isinstance(modes, Refresh)
        mean_gradient = MeanGradient(self.group, terms.place, compressor.memory, modes)
        sum_ = compressor.sum(self.group, terms.place)
        objection = reason_against_kernels(sum_, compressor.memory, terms)
        if objection is None:
            return QuantizedKernelRoute(sum_, compressor.memory, terms.gradient_dtype)
        return QuantizedRoute(sum_, compressor.memory, objection, mean_gradient)


def reason_against_kernels(sum_: QuantizedSum, memory: MemoryState, terms: Terms) -> str | None:
    """Why the kernels cannot do it, as a sentence; None if they can."""
    setting = memory.setting
    if not has_kernels(sum_.group.device):
        return f"there are no kernels for {sum_.group.device}"
    if terms.gradient_dtype not in FLOAT_CODES:
        return f"the kernels do not take gradients of {terms.gradient_dtype}"
    if not terms.aligned:
        return f"the kernels read buckets that begin at a multiple of {BUCKET_ALIGNMENT} bytes"
    if setting.keeps_state and setting.form != RESIDUAL:
        return f"the kernels do not know the memory {setting!r}"
    if max(sum_.offer.nbytes, *(slot.numel for slot in sum_.group.slots)) >= 1 << 31:
        return (
            "the kernels count the bytes of a message and the elements of a parameter with 32 bits"
        )
    if sum_.per_host > 1:
        return "the kernels do not know hosts of several ranks"
    if sum_.sum_quantizer is not sum_.quantizer:
        return "the kernels write sums as they write what is sent"
    if not sum_.quantizer.has_kernels:
        return "the kernels do not know these codes"
    if sum_.owned.size not in BLOCKS:
        return f"the kernels know blocks of {', '.join(map(str, BLOCKS))} elements"
    return None


def expected_bytes(sum_: QuantizedSum) -> list[float]:
    """Bytes this rank sends on behalf of each slot."""
    size = sum_.owned.size
    sent, sums = (q.bits_per_element(size) / 8 for q in (sum_.quantizer, sum_.sum_quantizer))
    across = (sum_.peers - 1) / sum_.peers * (sent + sums) / sum_.per_host
    itemsize = sum_.group.dtype.itemsize
    inside = (sum_.per_host - 1) / sum_.per_host * (itemsize + sums)
    return [(across + inside) * slot.numel for slot in sum_.group.slots]


def kept_bytes(sum_: QuantizedSum) -> int:
    """The codes for all owners, and this rank's own blocks; with hosts of several ranks all there was."""
    itemsize = sum_.group.dtype.itemsize
    if sum_.per_host > 1:
        return sum_.group.numel * itemsize
    own = sum_.owned.width * sum_.owned.size * itemsize
    return sum_.peers * sum_.offer.nbytes + own


def gathered(sum_: QuantizedSum) -> tuple[float, int]:
    """(bytes of the sums that this rank sends, rounds before that)."""
    if sum_.per_host > 1:
        return 0.0, 0
    return (sum_.peers - 1) * sum_.sums.nbytes, 1


class QuantizedRoute(Route):
    """In torch: what every other backend has to do bit for bit."""

    def __init__(
        self,
        sum_: QuantizedSum,
        memory: MemoryState,
        objection: str,
        mean_gradient: MeanGradient,
    ) -> None:
        numels = [slot.numel for slot in sum_.group.slots]
        super().__init__(sum_.group, mean_gradient.add_bytes(expected_bytes(sum_)), numels)
        self.sum = sum_
        self.memory = memory
        self.mean_gradient = mean_gradient
        self.objection = objection
        self.kept_bytes = kept_bytes(sum_)
        self.gathered_bytes, self.gathered_after = gathered(sum_)

    def open(self, step: GroupStep) -> Opened:
        flags, gradients = inspect(self.group, step.bucket_flat)
        account = self.memory.compensate(self.group, gradients, step.scale)
        # A sum of finite numbers can overflow; nothing of that may stay.
        overflow = ~account.c.isfinite().all()
        drop_if_bad(account.c, overflow)
        flags = Flags(flags.non_finite | overflow, flags.had_gradient)
        return Opened(self._run(account, flags, gradients, step), account)

    def _run(
        self, account: Account, flags: Flags, gradients: Sequence[Tensor], step: GroupStep
    ) -> Program[Outcome]:
        yield from self.mean_gradient.run(gradients, flags, step.counts, step.scale)
        divisor = self.memory.divisor(self.group, step.scale)
        scale = (None, None) if divisor is None else (divisor.flat, divisor.limit)
        outcome: Outcome = yield from self.sum.run(account, flags, step.counts, *scale)
        account.rest()
        return outcome


class QuantizedKernelRoute(Route):
    """The same by a few kernels, with the same bits."""

    backend = "CUDA kernels"

    def __init__(
        self, sum_: QuantizedSum, memory: MemoryState, gradient_dtype: torch.dtype
    ) -> None:
        numels = [slot.numel for slot in sum_.group.slots]
        super().__init__(sum_.group, expected_bytes(sum_), numels)
        self.sum = sum_
        self.kept_bytes = kept_bytes(sum_)
        self.gathered_bytes, self.gathered_after = gathered(sum_)
        self.residual = memory.stores.get("residual")
        self.kernels = QuantizedKernels(
            sum_.group,
            sum_.owned,
            sum_.quantizer,
            (sum_.offer, sum_.sums),
            sum_.place.rank,
            gradient_dtype,
            stochastic=sum_.stochastic,
            keeps=self.residual is not None,
        )

    def open(self, step: GroupStep) -> Opened:
        kernels, flat = self.kernels, step.bucket_flat
        if self.residual is None:
            nothing = kernels.never
            sent = kernels.send(flat, nothing, nothing, None, step.counts)
            return Opened(self._run(sent, None, flat))
        binding = self.residual.bind(self.group)
        before, c, ratio = binding.begin(step.scale)
        sent = kernels.send(flat, before, c, ratio, step.counts)
        account = QuantizedKernelAccount(c, binding, self, sent)
        return Opened(self._run(sent, account, flat), account)

    def _run(
        self, sent: SentCodes, account: QuantizedKernelAccount | None, flat: Tensor
    ) -> Program[Outcome]:
        kernels, group = self.kernels, self.group
        arrived = yield from self.sum.deal_out(sent.offer)
        kernels.add_up(arrived, sent, kernels.never if account is None else account.c)
        gathered = yield from self.sum.gather(sent.sums)
        out = flat
        if not kernels.into_bucket:
            out = torch.zeros(group.numel, device=group.device)
        kernels.deliver(gathered, out)
        if account is not None:
            account.arrive()
        return Outcome(out, kernels.wrong, delivered=kernels.into_bucket)


class QuantizedKernelAccount(TakeBackAccount):
    """What was sent is known by its codes, and a rank's own blocks are kept as they were until the verdict."""

    def __init__(
        self, c: Tensor, binding: Binding, route: QuantizedKernelRoute, sent: SentCodes
    ) -> None:
        super().__init__(c, [binding], route.kernels)
        self.sent = sent
        self._route = route

    def _joint_entry(self, used: Tensor) -> Joint | None:
        return self._route.kernels.joint_entry(self.c, self.sent, used, self._unused)

    def _give_back(self, used: Tensor, bad: Tensor) -> None:
        self._route.kernels.give_back(self.c, self.sent, used, bad, self._unused)

    def accepted(self) -> Tensor:
        sum_ = self._route.sum
        _, coded = sum_.offer.read(self.sent.offer)
        values = sum_.quantizer.decode(coded)
        own = self.sent.own.view(values.shape[1:])
        if self.used is None:
            values[sum_.peer] = own
        else:
            # So that c and what was accepted are together what memory handed out.
            self._return_unused()
            values[sum_.peer] = own - sum_.owned.cut(self.c, [sum_.owner])[0]
            taken = self.used[sum_.owned.slots.long()].bool()
            values = torch.where(taken[..., None], values, 0.0)
        total = torch.zeros(self._route.group.numel, device=values.device)
        sum_.owned.write(values, total)
        return total
