"""MeanGradient: the mean of raw gradients from which a memory's divisor learns on, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.exchange.base import Outcome
from thinwire.exchange.quantized import QuantizedSum
from thinwire.exchange.requests import Place, Program
from thinwire.exchange.sums import dense_mean
from thinwire.kernels.inspection import drop_if_bad
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
        self._sum: QuantizedSum | None = None
        self.bits = 0.0
        """Of every element that a rank sends for it, on either way."""
        if refresh is None:
            return
        self.bits = float(refresh.bits)
        if refresh.bits in QUANTIZERS:
            quantizer = QUANTIZERS[refresh.bits]
            self._sum = QuantizedSum(group, place, quantizer, BLOCK, stochastic=False, phase=PHASE)
            self.bits = quantizer.bits_per_element(BLOCK)

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
    ) -> Program[None]:
        """Have the memory learn from the mean over all ranks, in plain units, if a refresh is due.

        What is not finite in `gradients` counts as 0; `flags` tell of it.
        """
        if self._refresh is None:
            return
        group = self._group
        flat = torch.zeros(group.numel, dtype=group.dtype, device=group.device)
        add_gradients(flat, group, gradients)
        drop_if_bad(flat, flags.non_finite)
        if scale is not None:
            flat.div_(scale)
        if self._sum is None:
            mean = yield from dense_mean(flat, self._place, phase=PHASE)
        else:
            outcome: Outcome = yield from self._sum.run(Account(flat), flags, counts)
            mean = outcome.update
        self._memory.refresh(group, mean, counts)
