"""PreparedLaunch: a compiled kernel with its grid and its arguments, as the CUDA driver wants them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.errors import ExchangeError


@dataclass(frozen=True)
class Varying:
    """Stands for an argument that changes from step to step: the address of a tensor, or a number."""

    name: str
    is_number: bool = False


class Arguments:
    """The arguments of a kernel as the driver wants them.

    Tensors become pointers and must outlive the launch. Numbers have 32 bits. Structures and arrays stay as they are.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        self.boxes = [_box(arg) for arg in args]
        """What the pointers point to."""
        self.varying = [
            (box, arg.name)
            for box, arg in zip(self.boxes, args, strict=True)
            if isinstance(arg, Varying)
        ]
        """Boxes to fill before every launch, with the names of their values."""
        self.pointers = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, self.boxes))


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
    """Refuse a number of more than 32 bits: ctypes would cut it, and a kernel would read at another place."""
    if not -(1 << 31) <= number < 1 << 31:
        raise ExchangeError(f"a kernel cannot be told {number}, it counts with 32 bits")
    return number


class Kernel(Protocol):
    """A compiled kernel."""

    def __call__(self, blocks: int, threads: int, args: Sequence[Any] | Arguments) -> None: ...


class DriverKernel:
    """A compiled kernel on the current stream. Torch's own call looks its library up every time, which takes 0.1 ms."""

    def __init__(self, compiled: Any) -> None:
        # Keeps the module loaded.
        self._compiled = compiled
        self._launch = torch.cuda._utils._get_gpu_runtime_library().cuLaunchKernel

    def __call__(self, blocks: int, threads: int, args: Sequence[Any] | Arguments) -> None:
        if not isinstance(args, Arguments):
            args = Arguments(args)
        # Half the cost of asking for the stream as an object.
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        grid, block, shared_bytes = (blocks, 1, 1), (threads, 1, 1), 0
        code = self._launch(
            self._compiled.func,
            *grid,
            *block,
            shared_bytes,
            ctypes.c_void_p(stream),
            args.pointers,
            None,
        )
        if code:
            raise RuntimeError(f"the CUDA driver refused to launch a kernel (error {code})")


class PreparedLaunch:
    """A launch that is made in every step. Arguments that never change are boxed once."""

    def __init__(self, kernel: Kernel, blocks: int, threads: int, args: Sequence[Any]) -> None:
        self._kernel = kernel
        self._blocks, self._threads = blocks, threads
        self._arguments = Arguments(args)
        # The boxes hold addresses only.
        self._kept_alive = [arg for arg in args if isinstance(arg, Tensor)]

    def start(self, values: Mapping[str, int]) -> None:
        """`values` are addresses, and numbers that are `fitting`."""
        for box, name in self._arguments.varying:
            box.value = values[name]
        self._kernel(self._blocks, self._threads, self._arguments)
