"""Compiles the CUDA sources beside this file at run time and launches them.

NVRTC comes with torch's CUDA wheels, so that no toolkit is needed on the user's machine; what it made is kept (`binaries.py`). CUDA C++ instead of Triton for these, because a row in the registers of
one warp needs warp functions (ballots, integer reductions) that Triton does not give: 3.6 times the memory floor in Triton
against 1.1 to 1.3.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.errors import ExchangeError
from thinwire.kernels.cuda.binaries import OPTIONS, load_module

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
COMMON = "common.cuh"
INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
OLDEST_CAPABILITY = (7, 0)
PLAIN_SHARED_BYTES = 48 << 10
"""What a block may have without asking."""
Defines = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Varying:
    """Stands for an argument that is another one in every step: the address of a tensor, or a number."""

    name: str
    is_number: bool = False


class Arguments:
    """What a kernel is called with, as the driver wants it: tensors by pointer, numbers with 32 bits, structures and arrays of them
    as they are.

    Tensors must outlive the launch.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        self._boxes = [_box(arg) for arg in args]
        self.varying = [
            (box, arg.name)
            for box, arg in zip(self._boxes, args, strict=True)
            if isinstance(arg, Varying)
        ]
        """What has to be filled in before every launch."""
        self.pointers = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, self._boxes))


Box = ctypes.c_void_p | ctypes.c_int | ctypes.c_float | ctypes.Structure | ctypes.Array


def _box(arg: Any) -> Box:
    if isinstance(arg, ctypes.Structure | ctypes.Array):
        return arg
    if isinstance(arg, Varying):
        return ctypes.c_int() if arg.is_number else ctypes.c_void_p()
    if isinstance(arg, Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, float):
        return ctypes.c_float(arg)
    return ctypes.c_int(fitting(arg))


def fitting(number: int) -> int:
    """ctypes would cut what does not fit, and a kernel would read somewhere else."""
    if not -(1 << 31) <= number < 1 << 31:
        raise ExchangeError(f"a kernel cannot be told {number}, it counts with 32 bits")
    return number


class Kernel(Protocol):
    """A compiled kernel."""

    def __call__(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[Any] | Arguments,
        shared_mem: int = 0,
    ) -> None: ...


class Compiler(Protocol):
    def __call__(self, file: str, name: str, defines: Defines) -> Kernel: ...

    def __hash__(self) -> int: ...


def source_of(file: str, defines: Defines) -> str:
    """The complete text of one source file with its settings and what it includes from beside it."""
    settings = "".join(f"#define {name} {value}\n" for name, value in defines)
    path = SOURCES / file
    text = INCLUDE.sub(lambda found: (path.parent / found[1]).read_text(), path.read_text())
    return settings + (SOURCES / COMMON).read_text() + text


def compile_with_nvrtc(file: str, name: str, defines: Defines) -> Kernel:
    """A kernel for the current device."""
    return _compile(file, name, defines, torch.cuda.current_device())


@functools.cache
def _compile(file: str, name: str, defines: Defines, device: int) -> Kernel:
    source = source_of(file, defines)
    try:
        return DriverKernel(getattr(load_module(source), name))
    except (ImportError, AttributeError, TypeError):
        # Functions of torch's own that another release may have changed; this one is older, and compiles every time.
        compiled = torch.cuda._compile_kernel(source, name, nvcc_options=list(OPTIONS))
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
        args: Sequence[Any] | Arguments,
        shared_mem: int = 0,
    ) -> None:
        if shared_mem > self._allowed_shared:
            self._compiled.set_shared_memory_config(shared_mem)
            self._allowed_shared = shared_mem
        if not isinstance(args, Arguments):
            args = Arguments(args)
        # Half the cost of asking for the stream as an object.
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        code = self._launch(
            self._compiled.func,
            *grid,
            *block,
            shared_mem,
            ctypes.c_void_p(stream),
            args.pointers,
            None,
        )
        if code:
            raise RuntimeError(f"the CUDA driver refused to launch a kernel (error {code})")


class Site:
    """One launch that is made in every step, most of its arguments being the same: the rest is looked up and boxed once."""

    def __init__(
        self,
        kernel: Kernel,
        blocks: int,
        threads: int,
        args: Sequence[Any],
        shared_mem: int = 0,
    ) -> None:
        self._kernel = kernel
        self._grid, self._block = (blocks, 1, 1), (threads, 1, 1)
        self._shared_mem = shared_mem
        self._arguments = Arguments(args)
        # Only their addresses are in the boxes.
        self._held = [arg for arg in args if isinstance(arg, Tensor)]

    def launch(self, values: Mapping[str, int]) -> None:
        """`values` are addresses, and numbers that are `fitting`."""
        for box, name in self._arguments.varying:
            box.value = values[name]
        self._kernel(self._grid, self._block, self._arguments, self._shared_mem)


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
