"""Dense tensors on CUDA: one kernel before they are summed or gathered, one after.

References: `dense_mean` in thinwire/exchange/sums.py, and `MomentumAfterMean` for their momentum. What was gathered is summed in
rank order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.cuda.launch import PreparedLaunch, Varying, fitting
from thinwire.kernels.cuda.source import FLOAT_CODES, Defines
from thinwire.kernels.cuda.structs import declare, i32, i64, layout_of, make_table
from thinwire.kernels.cuda.toolchain import toolchain_of
from thinwire.layout import Group

STRETCH = 1024
"""Elements that one block takes: four for each thread."""
THREADS = 256
ALIGNMENT = 16
"""Bytes on the wire. What lies behind stays aligned."""
Stretch = declare("Stretch", (i64, "bucket"), (i32, "packed count"))
"""dense.cuh: neighbours that one block takes."""

STRETCH_DEFINES: Defines = (
    ("STRETCH", STRETCH),
    ("STRETCH_THREADS", THREADS),
    layout_of(Stretch),
)
"""Of dense.cuh and dense.cu, beside the floats of the bucket."""
FLOAT32_DEFINES: Defines = (("GRADIENT_CODE", FLOAT_CODES[torch.float32]), *STRETCH_DEFINES)


def cut_stretches(group: Group) -> Tensor:
    """struct Stretch of every part of every slot."""
    tables = []
    for source, slot in zip(group.sources, group.slots, strict=True):
        starts = torch.arange(0, slot.numel, STRETCH)
        counts = (slot.numel - starts).clamp(max=STRETCH)
        places = {"bucket": source.offset + starts, "packed": slot.offset + starts}
        tables.append(make_table(Stretch, **places, count=counts))
    return torch.cat(tables).to(group.device)


def packed_bytes(group: Group) -> int:
    """What a group's float32 values take on the wire."""
    return -(-4 * group.numel // ALIGNMENT) * ALIGNMENT


class FusedDense:
    """The kernels of one group of float32 slots."""

    def __init__(self, group: Group, world: int) -> None:
        toolchain, stretches = toolchain_of(group.device), cut_stretches(group)
        self.nbytes = packed_bytes(group)
        self.wrong = torch.zeros((), dtype=torch.bool, device=group.device)
        """bool []: a mean of the last step was not finite."""
        self._device = group.device
        bucket, packed = Varying("bucket"), Varying("packed")
        self._send = PreparedLaunch(
            toolchain.compile("dense.cu", "dense_send", FLOAT32_DEFINES),
            len(stretches),
            THREADS,
            [bucket, packed, stretches, self.wrong, world],
        )
        stride = Varying("stride", is_number=True)
        self._means = {
            ranks: PreparedLaunch(
                toolchain.compile("dense.cu", "dense_mean", FLOAT32_DEFINES),
                len(stretches),
                THREADS,
                [packed, bucket, stretches, self.wrong, ranks, stride],
            )
            for ranks in {1, world}
        }

    def send(self, bucket_flat: Tensor) -> Tensor:
        """uint8 [nbytes]: what this rank sends."""
        packed = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        self._send.start({"bucket": bucket_flat.data_ptr(), "packed": packed.data_ptr()})
        return packed

    def mean(self, gathered: Tensor, bucket_flat: Tensor) -> None:
        """Write the mean of all ranks into the bucket. `gathered` is [ranks, bytes], or [1, bytes] if it is summed already."""
        self._means[len(gathered)].start(
            {
                "packed": gathered.data_ptr(),
                "bucket": bucket_flat.data_ptr(),
                "stride": fitting(gathered.stride(0)),
            }
        )


class FusedMomentum:
    """The momentum of one group of float32 slots, whose means lie in the bucket."""

    def __init__(self, group: Group, momentum: float, nesterov: bool) -> None:
        toolchain, stretches = toolchain_of(group.device), cut_stretches(group)
        self._one = torch.ones(1, device=group.device)
        bucket, held, u, wrong, ratio = map(Varying, ("bucket", "held", "u", "wrong", "ratio"))
        self._launch = PreparedLaunch(
            toolchain.compile("dense.cu", "dense_momentum", FLOAT32_DEFINES),
            len(stretches),
            THREADS,
            [bucket, held, u, stretches, wrong, ratio, momentum, int(nesterov)],
        )

    def accumulate(
        self, bucket_flat: Tensor, held: Tensor, u: Tensor, ratio: Tensor | None, wrong: Tensor
    ) -> None:
        """Turn the means in the bucket into updates. u becomes `held` times `ratio`, carried on. `wrong` goes up if an update is
        not finite."""
        self._launch.start(
            {
                "bucket": bucket_flat.data_ptr(),
                "held": held.data_ptr(),
                "u": u.data_ptr(),
                "ratio": (self._one if ratio is None else ratio).data_ptr(),
                "wrong": wrong.data_ptr(),
            }
        )
