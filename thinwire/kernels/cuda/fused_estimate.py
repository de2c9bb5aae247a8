"""FusedEstimate: selection by thresholds that are estimated anew in every step, on CUDA.

One pass adds gradient and memory and measures every slot. From that, and from what further looks at memory tell, torch finds a
threshold for each slot: a few operations on as many numbers as there are slots, and nothing is read back. What reaches them is
then sent by the kernels of `FusedThreshold`.

Reference: `Residual`, `EstimateSession`, `Codec` and `AllGather`, chained by `PartsRoute`. The bits are the same, unless sums of
float64 in another order round a threshold to another float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.cuda.chunks import CHUNK_THREADS
from thinwire.kernels.cuda.chunks import DEFINES as CHUNK_DEFINES
from thinwire.kernels.cuda.fused_threshold import FusedThreshold, Goal, SlotState, ThresholdState
from thinwire.kernels.cuda.launch import PreparedLaunch, Varying
from thinwire.kernels.cuda.prepared import BEFORE, BUCKET, MEMORY, PAYLOAD, RATIO
from thinwire.kernels.cuda.source import Defines
from thinwire.kernels.cuda.structs import declare, layout_of, make_room
from thinwire.kernels.looks import Look, MeasuredTail, Tail, Targets
from thinwire.layout import Group
from thinwire.wire.codec import Codec

MEASURE = "measure.cu"
Measures = declare("Measures", (ctypes.c_double, "count total squares sum smallest largest"))
"""measure.cu: the fields of a `MeasuredTail`."""
MEASURE_DEFINES: Defines = (*CHUNK_DEFINES, *map(layout_of, (SlotState, Measures)))
LIMITS, MEASURED, COUNTS = map(Varying, ("limits", "measured", "counts"))
EACH = Varying("each", is_number=True)
Estimate = Callable[[Look], Tensor]
"""Thresholds [slots] from what a look tells."""


class FusedEstimate(FusedThreshold):
    """Selection by a threshold that `estimate` finds in every step."""

    def __init__(
        self,
        group: Group,
        codec: Codec,
        state: ThresholdState,
        goals: Sequence[Goal],
        gradient_dtype: torch.dtype,
        targets: Targets,
        estimate: Estimate,
    ) -> None:
        self.targets = targets
        self._estimate = estimate
        self._partial = make_room(Measures, len(state.chunks), group.device)
        super().__init__(group, codec, state, goals, gradient_dtype)

    def prepare(self) -> None:
        super().prepare()
        t, count = self.state, len(self.state.chunks)

        def launch(name: str, blocks: int, args: list[Any]) -> PreparedLaunch:
            return self._launch(MEASURE, name, MEASURE_DEFINES, blocks, CHUNK_THREADS, args)

        read = [BUCKET, BEFORE, MEMORY, PAYLOAD, t.chunks, RATIO, self._partial]
        self.measure_gradients = launch("measure_gradients", count, read)
        self.measure_held = launch("measure_held", count, [MEMORY, t.chunks, LIMITS, self._partial])
        self.sum_measures = launch("sum_measures", len(t.slots), [t.slots, self._partial, MEASURED])
        self.count_held = launch("count_held", count, [MEMORY, t.chunks, LIMITS, COUNTS, EACH])

    def _collection(self) -> tuple[str, list[Any]]:
        t = self.state
        return "collect_held", [MEMORY, PAYLOAD, t.chunks, t.thresholds]

    def _start_encoding(self, values: Mapping[str, int]) -> None:
        self.measure_gradients.start(values)
        self.state.thresholds.copy_(self._estimate(HeldLook(self, values)))
        super()._start_encoding(values)


class HeldLook(Look):
    """What kernels tell of c, which they have just written to memory."""

    def __init__(self, kernels: FusedEstimate, values: Mapping[str, int]) -> None:
        self.targets = kernels.targets
        self._kernels = kernels
        self._values = values
        self._everything = self._sum()

    def tail(self, beyond: Tensor | None = None) -> Tail:
        if beyond is None:
            return self._everything
        limits = beyond.float().contiguous()
        self._kernels.measure_held.start({**self._values, "limits": limits.data_ptr()})
        return self._sum()

    def count(self, beyond: Tensor) -> Tensor:
        limits = beyond.float().contiguous()
        counts = torch.zeros(limits.shape, dtype=torch.int32, device=limits.device)
        places = {"limits": limits.data_ptr(), "counts": counts.data_ptr()}
        each = limits.shape[1] if limits.dim() == 2 else 1
        self._kernels.count_held.start({**self._values, **places, "each": each})
        return counts

    def _sum(self) -> Tail:
        """Of the chunks that were measured last."""
        slots, device = len(self._kernels.goals), self.targets.device
        measured = torch.empty(slots, 6, dtype=torch.float64, device=device)
        self._kernels.sum_measures.start({"measured": measured.data_ptr()})
        return MeasuredTail(*measured.unbind(1))
