"""Compiles the CUDA sources beside this file at run time and launches them.

NVRTC comes with torch's CUDA wheels, so that no toolkit is needed on the user's machine. A kernel is compiled once per process
and set of `defines` (a fraction of a second each). CUDA C++ instead of Triton for these, because a row in the registers of
one warp needs warp functions (ballots, integer reductions) that Triton does not give: 3.6 times the memory floor in Triton
against 1.1 to 1.3.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
COMMON = "common.cuh"
INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
OLDEST_CAPABILITY = (7, 0)
PLAIN_SHARED_BYTES = 48 << 10
"""What a block may have without asking."""
Defines = tuple[tuple[str, int], ...]


class Kernel(Protocol):
    """A compiled kernel. Tensors travel as pointers, numbers as 32-bit integers."""

    def __call__(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[Any],
        shared_mem: int = 0,
    ) -> None: ...


class Compiler(Protocol):
    def __call__(self, file: str, name: str, defines: Defines) -> Kernel: ...


def source_of(file: str, defines: Defines) -> str:
    """The complete text of one source file with its settings and what it includes from beside it."""
    settings = "".join(f"#define {name} {value}\n" for name, value in defines)
    path = SOURCES / file
    text = INCLUDE.sub(lambda found: (path.parent / found[1]).read_text(), path.read_text())
    return settings + (SOURCES / COMMON).read_text() + text


@functools.cache
def compile_with_nvrtc(file: str, name: str, defines: Defines) -> Kernel:
    compiled = torch.cuda._compile_kernel(
        source_of(file, defines), name, nvcc_options=["--std=c++17"]
    )
    return DriverKernel(compiled)


class DriverKernel:
    """A compiled kernel on the current stream. Torch's own call looks its library up every time, a tenth of a millisecond."""

    def __init__(self, compiled: Any) -> None:
        # Keeps the module loaded.
        self._compiled = compiled
        self._allowed_shared = PLAIN_SHARED_BYTES
        self._launch = torch.cuda._utils._get_gpu_runtime_library().cuLaunchKernel

    def __call__(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[Any],
        shared_mem: int = 0,
    ) -> None:
        if shared_mem > self._allowed_shared:
            self._compiled.set_shared_memory_config(shared_mem)
            self._allowed_shared = shared_mem
        boxes = [
            ctypes.c_void_p(arg.data_ptr()) if isinstance(arg, torch.Tensor) else ctypes.c_int(arg)
            for arg in args
        ]
        pointers = (ctypes.c_void_p * len(boxes))(*map(ctypes.addressof, boxes))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = self._launch(self._compiled.func, *grid, *block, shared_mem, stream, pointers, None)
        if code:
            raise RuntimeError(f"the CUDA driver refused to launch a kernel (error {code})")


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether the kernels run on this device; says once why not."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    if torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        return False
    try:
        compile_with_nvrtc("settle.cu", "poison", (("GRADIENT_CODE", 0), ("VALUE_CODE", 0)))
    except Exception as error:
        logger.warning(
            "CUDA kernels could not be compiled (%s); selection falls back to torch and is many times slower",
            str(error).splitlines()[0] if str(error) else type(error).__name__,
        )
        return False
    return True
