"""QuantizedCompressor: memory -> blocks of small codes -> sums at their owners."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property

from thinwire.compress.base import BUCKET_ALIGNMENT, Compressor, GroupPlan, Route, Terms
from thinwire.compress.quantized_kernel_routes import (
    QuantizedKernelRoute,
    RefreshingKernelRoute,
    ScaledKernelRoute,
)
from thinwire.compress.quantized_routes import QuantizedRoute
from thinwire.compress.quantized_sums import make_kernels, reason_against_kernels
from thinwire.compress.refresh import MeanGradient
from thinwire.exchange.quantized import QuantizedSum
from thinwire.exchange.requests import Place
from thinwire.kernels.cuda.quantize import QuantizedKernels
from thinwire.kernels.cuda.source import FLOAT_CODES
from thinwire.layout import Group
from thinwire.memory.base import RESIDUAL, SCALED, Memory, MemoryState
from thinwire.memory.refresh import Refresh
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
        memory, terms = self._compressor.memory, self._terms
        assert modes is None or isinstance(modes, Refresh)
        common = self._sum, memory, MeanGradient(self.group, terms.place, memory, modes)
        objection = reason_against(self._sum, memory, terms)
        if objection is not None:
            return QuantizedRoute(*common, objection)
        if memory.setting.scaling is None:
            return QuantizedKernelRoute(*common, self._kernels)
        kind = ScaledKernelRoute if modes is None else RefreshingKernelRoute
        return kind(*common, self._kernels)

    @cached_property
    def _sum(self) -> QuantizedSum:
        """The same for all routes: it counts the steps from which draws are made."""
        return self._compressor.sum(self.group, self._terms.place)

    @cached_property
    def _kernels(self) -> QuantizedKernels:
        setting = self._compressor.memory.setting
        return make_kernels(
            self._sum,
            self.group,
            self._terms.gradient_dtype,
            keeps=setting.keeps_state,
            scaling=setting.scaling,
        )


def reason_against(sum_: QuantizedSum, memory: MemoryState, terms: Terms) -> str | None:
    """Why the kernels cannot take the gradient from a bucket and sum it, as a sentence; None if they can."""
    setting = memory.setting
    objection = reason_against_kernels(sum_)
    if objection is not None:
        return objection
    if terms.gradient_dtype not in FLOAT_CODES:
        return f"the kernels do not take gradients of {terms.gradient_dtype}"
    if not terms.aligned:
        return f"the kernels read buckets that begin at a multiple of {BUCKET_ALIGNMENT} bytes"
    if setting.keeps_state and setting.form not in (RESIDUAL, SCALED):
        return f"the kernels do not know the memory {setting!r}"
    return None
