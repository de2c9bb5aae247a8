"""Compiles the package's CUDA sources for the CPU, so that tests run the very kernels that run on a GPU."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from thinwire.kernels.cuda.launch import Arguments, Defines, source_of

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
SCRATCH = tempfile.TemporaryDirectory(prefix="thinwire-kernels-")

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="g++ compiles the kernels for the CPU"
)


KERNEL = re.compile(r"__global__[^;{]*?void (\w+)\((.*?)\)\s*{", re.DOTALL)


@functools.cache
def build(file: str, defines: Defines) -> ctypes.CDLL:
    """One library with a launcher for every kernel of a source file."""
    source = source_of(file, defines)
    launchers = []
    for name, parameters in KERNEL.findall(preprocess(source)):
        types = [re.sub(r"\w+$", "", part.strip()).strip() for part in parameters.split(",")]
        held = [f"{name}_{i}" for i in range(len(types))]
        launchers += [f"static {kind} {one};" for kind, one in zip(types, held, strict=True)]
        loads = "".join(
            f"{one} = *({kind}*)values[{i}];"
            for i, (kind, one) in enumerate(zip(types, held, strict=True))
        )
        launchers.append(
            f'extern "C" void launch_{name}(int grid, int block, void** values) {{ {loads} '
            f"run_grid(grid, block, [] {{ {name}({', '.join(held)}); }}); }}"
        )
    folder = Path(tempfile.mkdtemp(dir=SCRATCH.name))
    text = "\n".join([f'#include "{HEADER}"', source, *launchers])
    (folder / "kernel.cpp").write_text(text)
    library = folder / "kernel.so"
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-w"]
    # A vector from a place where a GPU finds none ends the process and says where.
    command += ["-fsanitize=alignment", "-fno-sanitize-recover=alignment"]
    # Which would take a jump from one fibre's stack to another's for an error.
    command += ["-U_FORTIFY_SOURCE"]
    subprocess.run([*command, "-o", library, folder / "kernel.cpp"], check=True, timeout=120)
    return ctypes.CDLL(str(library))


def preprocess(source: str) -> str:
    """Parameters may depend on settings."""
    command = ["g++", "-E", "-P", "-x", "c++", "-"]
    return subprocess.run(command, input=source, check=True, capture_output=True, text=True).stdout


def compile_for_cpu(file: str, name: str, defines: Defines):
    """A kernel in the sense of `thinwire.kernels.cuda.launch.Kernel`, for tensors on the CPU."""
    run = getattr(build(file, defines), f"launch_{name}")

    def kernel(grid, block, args, shared_mem=0):
        if not isinstance(args, Arguments):
            args = Arguments(args)
        run(grid[0], block[0], args.pointers)

    return kernel
