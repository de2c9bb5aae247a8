"""Compiled CUDA sources: once per process and set of `defines`, and kept on disk for the next process.

NVRTC takes half a second to a few seconds for a source, and a training run needs a dozen. They lie under `$THINWIRE_CACHE`, or
`thinwire/kernels` in the user's cache folder, named by everything they depend on; a folder that cannot be written to
only costs the time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
from pathlib import Path
from typing import Any

import torch

from thinwire.observe.files import write_bytes

OPTIONS = ("--std=c++17",)
KERNEL = re.compile(r'extern "C" __global__[^;{]*?\bvoid (\w+)\(')
"""NVRTC wants the name of one, and gives them all."""


def cache_folder() -> Path | None:
    """None where the user has no home, as in some containers."""
    own = os.environ.get("THINWIRE_CACHE")
    if own:
        return Path(own)
    users = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(users) if users else Path.home() / ".cache") / "thinwire" / "kernels"
    except RuntimeError:
        return None


def load_module(source: str) -> Any:
    """The source as a loaded module of the current device, an attribute per kernel."""
    return _load(source, torch.cuda.current_device())


@functools.cache
def _load(source: str, device: int) -> Any:
    from torch.cuda._utils import _cuda_load_module, _nvrtc_compile

    major, minor = torch.cuda.get_device_capability(device)
    parts = (source, f"sm_{major}{minor}", torch.__version__, str(torch.version.cuda), *OPTIONS)
    folder = cache_folder()
    file = folder and folder / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.bin"
    kept = _read(file) if file else None
    if kept is not None:
        # One that was cut short, or that this driver does not take, is made anew.
        with contextlib.suppress(RuntimeError):
            return _cuda_load_module(kept)
    found = KERNEL.search(source)
    assert found is not None
    binary, _ = _nvrtc_compile(source, found[1], nvcc_options=list(OPTIONS))
    if file:
        _write(file, binary)
    return _cuda_load_module(binary)


def _read(file: Path) -> bytes | None:
    try:
        return file.read_bytes() or None
    except OSError:
        return None


def _write(file: Path, binary: bytes) -> None:
    """The ranks of a host write the same file at the same moment."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, binary)
