"""SumRoute: a group that travels as quantised sums, and what that costs. QuantizedRoute does it in torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from thinwire.compress.base import GroupStep, Opened, Route
from thinwire.compress.refresh import MeanGradient
from thinwire.exchange.base import Outcome
from thinwire.exchange.quantized import QuantizedSum
from thinwire.exchange.requests import Program
from thinwire.kernels.inspection import inspect
from thinwire.memory.account import Account
from thinwire.memory.base import MemoryState
from thinwire.wire.codec import Flags


class SumRoute(Route):
    """What all backends have in common: the exchange and its bytes."""

    def __init__(
        self, sum_: QuantizedSum, memory: MemoryState, mean_gradient: MeanGradient
    ) -> None:
        numels = [slot.numel for slot in sum_.group.slots]
        super().__init__(sum_.group, mean_gradient.add_bytes(expected_bytes(sum_)), numels)
        self.sum = sum_
        self.memory = memory
        self.mean_gradient = mean_gradient
        self.kept_bytes = kept_bytes(sum_)
        self.gathered_bytes, self.gathered_after = gathered(sum_)


class QuantizedRoute(SumRoute):
    """In torch: what every other backend has to do bit for bit."""

    def __init__(
        self,
        sum_: QuantizedSum,
        memory: MemoryState,
        mean_gradient: MeanGradient,
        objection: str,
    ) -> None:
        super().__init__(sum_, memory, mean_gradient)
        self.objection = objection

    def open(self, step: GroupStep) -> Opened:
        flags, gradients = inspect(self.group, step.bucket_flat)
        account = self.memory.compensate(self.group, gradients, step.scale)
        # A sum of finite numbers can overflow.
        overflow = account.drop_all_overflow()
        flags = Flags(flags.non_finite | overflow, flags.had_gradient)
        return Opened(self._run(account, flags, gradients, step), account)

    def _run(
        self, account: Account, flags: Flags, gradients: Sequence[Tensor], step: GroupStep
    ) -> Program[Outcome]:
        flags = yield from self.mean_gradient.run(gradients, flags, step.counts, step.scale)
        divisor = self.memory.divisor(self.group, step.scale)
        scale = (None, None) if divisor is None else (divisor.flat, divisor.limit)
        outcome: Outcome = yield from self.sum.run(account, flags, step.counts, *scale)
        account.rest()
        return outcome


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
