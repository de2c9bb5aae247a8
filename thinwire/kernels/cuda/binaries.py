"""Compiled CUDA sources. Each is compiled once per process and set of defines, and kept on disk for the next process (`cache.py`).

NVRTC takes half a second to a few seconds for a source, and a training run needs a dozen. The names of the files are hashes of all
they depend on. If nothing can be kept, every process compiles.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from typing import Any

import torch

from thinwire.kernels.cuda.cache import keep_binary, read_binary

OPTIONS = ("--std=c++17",)
KERNEL = re.compile(r'extern "C" __global__[^;{]*?\bvoid (\w+)\(')
"""NVRTC wants the name of one kernel, and compiles all."""


def load_module(source: str) -> Any:
    """The source as a loaded module of the current device, an attribute per kernel."""
    return load_for(source, torch.cuda.current_device())


@functools.cache
def load_for(source: str, device: int) -> Any:
    """The same for a device by its number; once per process."""
    from torch.cuda._utils import _cuda_load_module, _nvrtc_compile

    major, minor = torch.cuda.get_device_capability(device)
    parts = (source, f"sm_{major}{minor}", torch.__version__, str(torch.version.cuda), *OPTIONS)
    name = f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.bin"
    kept = read_binary(name)
    if kept is not None:
        # A file that this driver does not take is made anew.
        with contextlib.suppress(RuntimeError):
            return _cuda_load_module(kept)
    found = KERNEL.search(source)
    assert found is not None
    binary, _ = _nvrtc_compile(source, found[1], nvcc_options=list(OPTIONS))
    keep_binary(name, binary)
    return _cuda_load_module(binary)
