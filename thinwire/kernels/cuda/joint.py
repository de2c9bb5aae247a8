"""One launch applies a step's verdict to many accounts: each of its own would cost the host more than it costs the device."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.cuda.launch import Compiler, Defines, Kernel

BLOCKS_EACH = 8
"""Blocks for each of many accounts."""
THREADS = 128


class JointKernel:
    """Takes the entries of accounts, structures as its source knows them, and a flag that is usually down."""

    def __init__(self, kernel: Kernel, entry: type[ctypes.Structure], most: int) -> None:
        self._kernel = kernel
        self._table = entry * most
        self._most = most

    def settle(self, entries: Sequence[ctypes.Structure], bad: Tensor) -> None:
        """Tensors that entries point to must outlive the launch."""
        for start in range(0, len(entries), self._most):
            part = entries[start : start + self._most]
            grid = (BLOCKS_EACH * len(part), 1, 1)
            self._kernel(grid, (THREADS, 1, 1), [self._table(*part), bad, BLOCKS_EACH])


Joint = tuple[JointKernel, ctypes.Structure]
"""How one account is settled together with others."""


@functools.cache
def joint_kernel(
    compiler: Compiler,
    file: str,
    name: str,
    defines: Defines,
    entry: type[ctypes.Structure],
    most: int,
    device: torch.device,
) -> JointKernel:
    """The same one for all who ask for the same; `most` entries are what its source has room for."""
    return JointKernel(compiler(file, name, defines), entry, most)
