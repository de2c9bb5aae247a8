"""Toolchain: what compiles the CUDA sources, and for which devices there is one."""

from __future__ import annotations

import contextlib
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from thinwire.kernels.cuda.binaries import OPTIONS, load_module
from thinwire.kernels.cuda.launch import DriverKernel, Kernel
from thinwire.kernels.cuda.source import Defines, source_of
from thinwire.kernels.cuda.tuning import Tuning

logger = logging.getLogger(__name__)

OLDEST_CAPABILITY = (7, 0)


class Toolchain(ABC):
    """Compiles kernels for the devices of one type."""

    def __init__(self, tuning: Tuning | None = None) -> None:
        self.tuning = tuning or Tuning()

    @abstractmethod
    def compile(self, file: str, name: str, defines: Defines) -> Kernel:
        """The kernel `name` of a source file. Compiles a source and its defines once."""

    def serves(self, device: torch.device) -> bool:
        """Whether its kernels run on this device."""
        return True


class Nvrtc(Toolchain):
    """NVRTC comes with torch's CUDA wheels: a user needs no CUDA toolkit. What it compiled is kept (`binaries.py`).

    CUDA C++ and not Triton, because selection lives on warp functions (ballots, integer reductions) that Triton does not
    give. Exact top-k took 3.6 times the memory floor in Triton; here it takes 1.1 to 1.3.
    """

    def compile(self, file: str, name: str, defines: Defines) -> Kernel:
        """A kernel for the current device."""
        return _compile(file, name, defines, torch.cuda.current_device())

    def serves(self, device: torch.device) -> bool:
        return _compiles(device)


@functools.cache
def _compile(file: str, name: str, defines: Defines, device: int) -> Kernel:
    return _load(source_of(file, defines), name)


def _load(source: str, name: str) -> Kernel:
    try:
        return DriverKernel(getattr(load_module(source), name))
    except (ImportError, AttributeError, TypeError):
        # `load_module` uses private functions that another release of torch may have changed.
        # `_compile_kernel` is older, but compiles in every process.
        compiled = torch.cuda._compile_kernel(source, name, nvcc_options=list(OPTIONS))
        return DriverKernel(compiled)


@functools.cache
def _compiles(device: torch.device) -> bool:
    """Tries the smallest source, and says once why it failed."""
    # Not at the top: that module imports this one.
    from thinwire.kernels.cuda.restore import DEFINES

    if torch.version.cuda is None:
        return False
    if torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        return False
    try:
        _load(source_of("restore.cu", DEFINES), "restore_all")
    except Exception as error:
        logger.warning(
            "CUDA kernels could not be compiled (%s); selection falls back to torch and is many times slower",
            str(error).splitlines()[0] if str(error) else type(error).__name__,
        )
        return False
    return True


_toolchains: dict[str, Toolchain | None] = {"cuda": Nvrtc()}
"""By device type."""


def kernels_for(device: torch.device) -> Toolchain | None:
    """The toolchain whose kernels run on this device, None if there is none."""
    toolchain = _toolchains.get(device.type)
    return toolchain if toolchain is not None and toolchain.serves(device) else None


def has_kernels(device: torch.device) -> bool:
    return kernels_for(device) is not None


def toolchain_of(device: torch.device) -> Toolchain:
    """The same where the caller knows that there is one."""
    toolchain = kernels_for(device)
    assert toolchain is not None, f"there are no kernels for {device}"
    return toolchain


@contextlib.contextmanager
def use_toolchain(device_type: str, toolchain: Toolchain | None) -> Iterator[None]:
    """Inside, kernels for devices of this type come from another toolchain, or there are none."""
    before = _toolchains.get(device_type)
    _toolchains[device_type] = toolchain
    try:
        yield
    finally:
        _toolchains[device_type] = before
