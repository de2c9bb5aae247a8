"""Compiles the package's CUDA sources for the CPU, so that tests run the very kernels that run on a GPU.

Blocks and threads run in an order that is drawn; `THINWIRE_KERNEL_ORDER=1 pytest tests/kernels` draws another one.

A compiled source is kept for later runs, of other clones too: under `$THINWIRE_TEST_CACHE`, or `thinwire/cpu_kernels` in the user's
cache folder. Its name is a hash of all that it depends on. What no run has used for a month is removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from thinwire.kernels.cuda.launch import Arguments, Kernel
from thinwire.kernels.cuda.source import Defines, source_of
from thinwire.kernels.cuda.toolchain import Toolchain, use_toolchain
from thinwire.kernels.cuda.tuning import Tuning

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
ORDER = int(os.environ.get("THINWIRE_KERNEL_ORDER", "0"))
"""Which of the orders that a GPU might choose blocks and threads run in."""
MONTH = 30 * 24 * 3600.0
COMPILER = (
    *("g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-w"),
    # A vector from a place where a GPU finds none ends the process and says where.
    *("-fsanitize=alignment", "-fno-sanitize-recover=alignment"),
    # Fortified jumps would take a jump from one fibre's stack to another's for an error.
    "-U_FORTIFY_SOURCE",
)
KERNEL = re.compile(r"__global__[^;{]*?void (\w+)\((.*?)\)\s*{", re.DOTALL)

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="g++ compiles the kernels for the CPU"
)


class CpuToolchain(Toolchain):
    """Kernels for tensors on the CPU. `wrap(name, kernel)` may put something around each of them."""

    def __init__(
        self,
        tuning: Tuning | None = None,
        wrap: Callable[[str, Kernel], Kernel] = lambda name, kernel: kernel,
    ) -> None:
        super().__init__(tuning)
        self._wrap = wrap

    def compile(self, file: str, name: str, defines: Defines) -> Kernel:
        run = getattr(load(file, defines), f"launch_{name}")

        def kernel(blocks: int, threads: int, args: Any) -> None:
            # Under another name: tensors that only the caller's list holds have to outlive the launch.
            boxed = args if isinstance(args, Arguments) else Arguments(args)
            run(blocks, threads, boxed.pointers, ORDER)

        return self._wrap(name, kernel)


PLAIN = CpuToolchain()
"""One for all tests that need nothing special, so that what is cached by toolchain is shared."""


class Switch:
    """Turns the kernels for one type of device on and off, and chooses their toolchain."""

    def __init__(
        self, stack: contextlib.ExitStack, device_type: str, toolchain: Toolchain | None
    ) -> None:
        self._stack, self._device_type, self._toolchain = stack, device_type, toolchain

    def __call__(self, on: bool) -> None:
        toolchain = self._toolchain if on else None
        self._stack.enter_context(use_toolchain(self._device_type, toolchain))

    def use(self, toolchain: Toolchain) -> None:
        """From now on these are the kernels that can be turned on. They are on."""
        self._toolchain = toolchain
        self(True)

    def tune(self, **sizes: int) -> None:
        """The same kernels, with other sizes."""
        self.use(CpuToolchain(Tuning(**sizes)))


@contextlib.contextmanager
def switch(device_type: str, toolchain: Toolchain | None) -> Iterator[Switch]:
    """Inside, kernels are on at first; behind, everything is as before."""
    with contextlib.ExitStack() as stack:
        made = Switch(stack, device_type, toolchain)
        made(True)
        yield made


# -- compiled sources -----------------------------------------------------------------------------------------------


@functools.cache
def load(file: str, defines: Defines) -> ctypes.CDLL:
    """One library with a launcher for every kernel of a source file."""
    library = kept(file, defines)
    if library.exists():
        library.touch()
    else:
        build(source_of(file, defines), library)
    return ctypes.CDLL(str(library))


def kept(file: str, defines: Defines) -> Path:
    """Where the library of a source file is, or will be."""
    source = source_of(file, defines)
    parts = (source, HEADER.read_text(), Path(__file__).read_text(), compiler_version(), COMPILER)
    return cache_folder() / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.so"


@functools.cache
def user_folder() -> Path:
    """In the user's cache folder; in the repository where that cannot be written to."""
    users = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(users) if users else Path.home() / ".cache") / "thinwire" / "cpu_kernels"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return Path(__file__).parents[2] / ".kernel_cache"
    for old in folder.iterdir():
        with contextlib.suppress(OSError):
            if old.stat().st_mtime < time.time() - MONTH:
                old.unlink()
    return folder


def cache_folder() -> Path:
    own = os.environ.get("THINWIRE_TEST_CACHE")
    return Path(own) if own else user_folder()


@functools.cache
def compiler_version() -> str:
    command = [COMPILER[0], "--version"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def build(source: str, library: Path) -> None:
    """Two processes may build the same at once: each under a name of its own, and a rename makes it visible."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-") as folder:
        text, made = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        text.write_text("\n".join([f'#include "{HEADER}"', source, *launchers(source)]))
        subprocess.run([*COMPILER, "-o", made, text], check=True, timeout=120)
        made.replace(library)


def launchers(source: str) -> Iterator[str]:
    """A function per kernel that takes the driver's array of pointers to arguments."""
    for name, parameters in KERNEL.findall(preprocess(source)):
        types = [re.sub(r"\w+$", "", part.strip()).strip() for part in parameters.split(",")]
        held = [f"{name}_{i}" for i in range(len(types))]
        yield from (f"STAYS {kind} {one};" for kind, one in zip(types, held, strict=True))
        loads = "".join(
            f"{one} = *({kind}*)values[{i}];"
            for i, (kind, one) in enumerate(zip(types, held, strict=True))
        )
        yield (
            f'extern "C" void launch_{name}(int grid, int block, void** values, int order) {{ {loads} '
            f"run_grid(grid, block, [] {{ {name}({', '.join(held)}); }}, order); }}"
        )


def preprocess(source: str) -> str:
    """Parameters may depend on settings."""
    command = ["g++", "-E", "-P", "-x", "c++", "-"]
    return subprocess.run(command, input=source, check=True, capture_output=True, text=True).stdout
