"""Dense tensors on CUDA: one kernel before and one after their sum, or after they were gathered beside payloads.

Reference: `dense_mean` in thinwire/exchange/dense.py; what was gathered is summed in rank order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.cuda.launch import Compiler, Site, Varying, compile_with_nvrtc
from thinwire.plan.groups import Group

STRETCH = 4096
"""Elements that one block takes."""
THREADS = 256
ALIGNMENT = 16
"""Bytes; what lies behind on the wire stays aligned."""


class FusedDense:
    """The kernels of one group of float32 slots."""

    compiler: Compiler = staticmethod(compile_with_nvrtc)

    def __init__(self, group: Group, world: int) -> None:
        rows = [
            [source.offset + start, slot.offset + start | min(STRETCH, slot.numel - start) << 32]
            for source, slot in zip(group.sources, group.slots, strict=True)
            for start in range(0, slot.numel, STRETCH)
        ]
        stretches = torch.tensor(rows, dtype=torch.int64, device=group.device)
        self.nbytes = -(-4 * group.numel // ALIGNMENT) * ALIGNMENT
        self.wrong = torch.zeros((), dtype=torch.bool, device=group.device)
        """bool []: a mean of the last step was not finite."""
        self._device = group.device
        defines = (("VALUE_CODE", 0), ("GRADIENT_CODE", 0))
        bucket, packed = Varying("bucket"), Varying("packed")
        known = [stretches, self.wrong, world]
        self._send = Site(
            self.compiler("dense.cu", "dense_send", defines),
            len(rows),
            THREADS,
            [bucket, packed, *known],
        )
        self._means = {
            ranks: Site(
                self.compiler("dense.cu", "dense_mean", defines),
                len(rows),
                THREADS,
                [packed, bucket, stretches, self.wrong, ranks, Varying("stride")],
            )
            for ranks in {1, world}
        }

    def send(self, bucket_flat: Tensor) -> Tensor:
        """uint8 [nbytes]: what this rank sends."""
        packed = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        self._send.launch({"bucket": bucket_flat, "packed": packed})
        return packed

    def mean(self, gathered: Tensor, bucket_flat: Tensor) -> None:
        """Write the mean of what all ranks sent ([ranks, bytes], or [1, bytes] where it is summed already) into the bucket."""
        self._means[len(gathered)].launch(
            {"packed": gathered, "bucket": bucket_flat, "stride": gathered.stride(0)}
        )
