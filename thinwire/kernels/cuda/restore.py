"""Restoring on CUDA: one launch for all that a step has changed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from thinwire.kernels.cuda.joint import joint_kernel
from thinwire.kernels.cuda.source import Defines
from thinwire.kernels.cuda.structs import declare, i64, layout_of, pointer
from thinwire.kernels.cuda.toolchain import toolchain_of

MOST_RECORDS = 160
"""Tensors that one launch restores."""
BLOCKS_EACH = 32
RestoreRecord = declare("RestoreRecord", (pointer, "now before"), (i64, "bytes"))
"""restore.cu: a tensor, and what it has to be again. Both must outlive the launch."""
DEFINES: Defines = (("MOST_RECORDS", MOST_RECORDS), layout_of(RestoreRecord))


def restore_by_kernel(pairs: Sequence[tuple[Tensor, Tensor]], bad: Tensor) -> None:
    """If the flag `bad` is up, copy the second of every pair to the first."""
    source = ("restore.cu", "restore_all", DEFINES, RestoreRecord, MOST_RECORDS)
    kernel = joint_kernel(toolchain_of(bad.device), *source, bad.device)
    records = [
        RestoreRecord(now.data_ptr(), before.data_ptr(), now.nbytes) for now, before in pairs
    ]
    kernel.settle(records, bad, BLOCKS_EACH)
