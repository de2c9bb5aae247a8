"""MeanGradient: the mean of raw gradients from which a memory's divisor learns on, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from thinwire.compress.quantized_sums import add_up, make_kernels, reason_against_kernels
from thinwire.exchange.base import Outcome
from thinwire.exchange.quantized import QuantizedSum
from thinwire.exchange.requests import Place, Program
from thinwire.exchange.sums import dense_mean
from thinwire.kernels.inspection import drop_if_bad, holds_non_finite
from thinwire.layout import Group
from thinwire.memory.account import Account
from thinwire.memory.base import MemoryState, add_gradients
from thinwire.memory.refresh import Refresh
from thinwire.wire.codec import Flags
from thinwire.wire.quantize import QUANTIZERS

BLOCK = 128
"""Elements that share a scale."""
PHASE = "refresh"


class MeanGradient:
    """The refresh of one group, decided once. The gradients themselves stay as they are."""

    def __init__(
        self, group: Group, place: Place, memory: MemoryState, refresh: Refresh | None
    ) -> None:
        self._group = group
        self._place = place
        self._memory = memory
        self._refresh = refresh
        self._mean: Mean = DenseMean(place)
        self.bits = 0.0
        """Of every element that a rank sends for it, on either way."""
        self.objection: str | None = None
        """Why torch sums it, as a sentence; None if kernels do, or if nothing is refreshed."""
        if refresh is None:
            return
        self.bits = float(refresh.bits)
        if refresh.bits in QUANTIZERS:
            quantizer = QUANTIZERS[refresh.bits]
            sum_ = QuantizedSum(group, place, quantizer, BLOCK, stochastic=False, phase=PHASE)
            self._mean, self.objection = choose_mean(sum_)
            self.bits = quantizer.bits_per_element(BLOCK)

    @property
    def due(self) -> bool:
        return self._refresh is not None

    def add_bytes(self, slot_bytes: Sequence[float]) -> list[float]:
        """Bytes of every slot with those of the refresh."""
        world = self._place.world
        share = 2 * (world - 1) / world * self.bits / 8
        slots = zip(slot_bytes, self._group.slots, strict=True)
        return [sent + share * slot.numel for sent, slot in slots]

    def run(
        self,
        gradients: Sequence[Tensor],
        flags: Flags,
        counts: Sequence[int],
        scale: Tensor | None,
    ) -> Program[Flags]:
        """Have the memory learn from the mean over all ranks, in plain units, if a refresh is due.

        What is not finite in `gradients` counts as 0; `flags` tell of it. Those that are returned tell of what is not finite
        in plain units too: a `scale` below 1 can do that, and the optimizer would get no less of it.
        """
        if self._refresh is None:
            return flags
        group = self._group
        flat = torch.zeros(group.numel, dtype=group.dtype, device=group.device)
        add_gradients(flat, group, gradients)
        drop_if_bad(flat, flags.non_finite)
        if scale is not None:
            flat.div_(scale)
            overflow = holds_non_finite(flat)
            drop_if_bad(flat, overflow)
            flags = replace(flags, non_finite=flags.non_finite | overflow)
        mean = yield from self._mean.run(flat, flags, counts)
        self._memory.refresh(group, mean, counts)
        return flags


class Mean(Protocol):
    """One way to the mean of a group's flat buffer over all ranks."""

    def run(self, flat: Tensor, flags: Flags, counts: Sequence[int]) -> Program[Tensor]:
        """`flat` is finite, and may be written to. `flags` are those of the gradients in it."""


class DenseMean:
    """In the precision of the buffer."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def run(self, flat: Tensor, flags: Flags, counts: Sequence[int]) -> Program[Tensor]:
        mean = yield from dense_mean(flat, self._place, phase=PHASE)
        return mean


class QuantizedMean:
    """A quantised sum without a memory, in torch."""

    def __init__(self, sum_: QuantizedSum) -> None:
        self._sum = sum_

    def run(self, flat: Tensor, flags: Flags, counts: Sequence[int]) -> Program[Tensor]:
        outcome: Outcome = yield from self._sum.run(Account(flat), flags, counts)
        return outcome.update


class KernelMean:
    """The same by kernels, with the same bits. A slot without a gradient is 0 on all ranks, so that its flag changes nothing."""

    def __init__(self, sum_: QuantizedSum) -> None:
        self._sum = sum_
        # The buffer that it reads and writes is laid out as memory is.
        group = replace(sum_.group, sources=sum_.group.slots)
        self._kernels = make_kernels(sum_, group, torch.float32, keeps=False)

    def run(self, flat: Tensor, flags: Flags, counts: Sequence[int]) -> Program[Tensor]:
        kernels = self._kernels
        sent = kernels.begin(counts)
        kernels.send(sent, flat, kernels.never, kernels.never, None)
        gathered = yield from add_up(self._sum, kernels, sent, kernels.never)
        kernels.deliver(gathered, sent, flat)
        return flat


def choose_mean(sum_: QuantizedSum) -> tuple[Mean, str | None]:
    """(who sums, why no kernels do)."""
    objection = reason_against_kernels(sum_)
    if sum_.group.dtype != torch.float32:
        objection = f"the kernels do not sum {sum_.group.dtype}"
    if objection is None:
        return KernelMean(sum_), None
    return QuantizedMean(sum_), f"torch sums the mean gradient of a refresh: {objection}"
