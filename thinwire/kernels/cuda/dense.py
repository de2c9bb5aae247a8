"""Dense tensors on CUDA: one kernel before and one after their sum, or after they were gathered beside payloads.

Reference: `dense_mean` in thinwire/exchange/dense.py; what was gathered is summed in rank order. `DenseMomentumCompressor` for
their momentum.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from thinwire.kernels.cuda.joint import JointKernel, joint_kernel
from thinwire.kernels.cuda.launch import Compiler, Site, Varying, compile_with_nvrtc, fitting
from thinwire.plan.groups import Group

STRETCH = 1024
"""Elements that one block takes: four for each thread, all of them under way at once."""
THREADS = 256
ALIGNMENT = 16
"""Bytes; what lies behind on the wire stays aligned."""
DEFINES = (("VALUE_CODE", 0), ("GRADIENT_CODE", 0))
MOST_TRACES = 128


def cut_stretches(group: Group) -> Tensor:
    """int64 [stretches, 2]: struct Stretch of dense.cuh, two 32-bit numbers to a word."""
    rows = [
        [source.offset + start, slot.offset + start | min(STRETCH, slot.numel - start) << 32]
        for source, slot in zip(group.sources, group.slots, strict=True)
        for start in range(0, slot.numel, STRETCH)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=group.device)


def packed_bytes(group: Group) -> int:
    """What a group's float32 values take on the wire."""
    return -(-4 * group.numel // ALIGNMENT) * ALIGNMENT


class FusedDense:
    """The kernels of one group of float32 slots."""

    compiler: Compiler = staticmethod(compile_with_nvrtc)

    def __init__(self, group: Group, world: int) -> None:
        stretches = cut_stretches(group)
        self.nbytes = packed_bytes(group)
        self.wrong = torch.zeros((), dtype=torch.bool, device=group.device)
        """bool []: a mean of the last step was not finite."""
        self._device = group.device
        bucket, packed = Varying("bucket"), Varying("packed")
        self._send = Site(
            self.compiler("dense.cu", "dense_send", DEFINES),
            len(stretches),
            THREADS,
            [bucket, packed, stretches, self.wrong, world],
        )
        stride = Varying("stride", is_number=True)
        self._means = {
            ranks: Site(
                self.compiler("dense.cu", "dense_mean", DEFINES),
                len(stretches),
                THREADS,
                [packed, bucket, stretches, self.wrong, ranks, stride],
            )
            for ranks in {1, world}
        }

    def send(self, bucket_flat: Tensor) -> Tensor:
        """uint8 [nbytes]: what this rank sends."""
        packed = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        self._send.launch({"bucket": bucket_flat.data_ptr(), "packed": packed.data_ptr()})
        return packed

    def mean(self, gathered: Tensor, bucket_flat: Tensor) -> None:
        """Write the mean of what all ranks sent ([ranks, bytes], or [1, bytes] where it is summed already) into the bucket."""
        self._means[len(gathered)].launch(
            {
                "packed": gathered.data_ptr(),
                "bucket": bucket_flat.data_ptr(),
                "stride": fitting(gathered.stride(0)),
            }
        )


class Trace(ctypes.Structure):
    """struct Trace of dense.cu."""

    _fields_ = [
        ("u", ctypes.c_void_p),
        ("before", ctypes.c_void_p),
        ("count", ctypes.c_longlong),
    ]


class FusedMomentum:
    """The momentum of one group of float32 slots, whose means lie in the bucket."""

    def __init__(self, group: Group, momentum: float, nesterov: bool) -> None:
        self.before = torch.zeros(group.numel, device=group.device)
        """What u was before the last step, in the units of that step."""
        compiler, stretches = FusedDense.compiler, cut_stretches(group)
        self._one = torch.ones(1, device=group.device)
        bucket, u, wrong, ratio = map(Varying, ("bucket", "u", "wrong", "ratio"))
        self._site = Site(
            compiler("dense.cu", "dense_momentum", DEFINES),
            len(stretches),
            THREADS,
            [bucket, u, self.before, stretches, wrong, ratio, momentum, int(nesterov)],
        )
        self.joint: JointKernel = joint_kernel(
            compiler, "dense.cu", "restore_all", DEFINES, Trace, MOST_TRACES, group.device
        )

    def accumulate(
        self, bucket_flat: Tensor, u: Tensor, ratio: Tensor | None, wrong: Tensor
    ) -> None:
        """Means become updates, u times `ratio` the new u; `wrong` goes up if an update is not finite."""
        self._site.launch(
            {
                "bucket": bucket_flat.data_ptr(),
                "u": u.data_ptr(),
                "ratio": (self._one if ratio is None else ratio).data_ptr(),
                "wrong": wrong.data_ptr(),
            }
        )

    def trace(self, u: Tensor) -> Trace:
        """What `joint` needs to know to make u again what it was."""
        return Trace(u.data_ptr(), self.before.data_ptr(), u.numel())
