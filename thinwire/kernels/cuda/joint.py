"""JointKernel: one launch that applies a step's verdict to many accounts. A launch for each would cost the host too much."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.cuda.launch import Kernel
from thinwire.kernels.cuda.source import Defines
from thinwire.kernels.cuda.structs import Struct
from thinwire.kernels.cuda.toolchain import Toolchain

BLOCKS_EACH = 8
"""Blocks for each of many accounts."""
THREADS = 128


class JointKernel:
    """Takes a record of every account, and a flag that is usually down."""

    def __init__(self, kernel: Kernel, record: Struct, most: int) -> None:
        self._kernel = kernel
        self._table = record * most
        self._most = most

    def settle(
        self, records: Sequence[ctypes.Structure], bad: Tensor, blocks_each: int = BLOCKS_EACH
    ) -> None:
        """Tensors that records point to must outlive the launch."""
        for start in range(0, len(records), self._most):
            part = records[start : start + self._most]
            blocks = blocks_each * len(part)
            self._kernel(blocks, THREADS, [self._table(*part), bad, blocks_each])


Joint = tuple[JointKernel, ctypes.Structure]
"""How an account is settled together with others: the kernel, and the account's record."""


@functools.cache
def joint_kernel(
    toolchain: Toolchain,
    file: str,
    name: str,
    defines: Defines,
    record: Struct,
    most: int,
    device: torch.device,
) -> JointKernel:
    """The same kernel for all who ask for the same. Its source has room for `most` records."""
    return JointKernel(toolchain.compile(file, name, defines), record, most)
