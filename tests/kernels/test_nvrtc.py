"""Every CUDA source is one that NVRTC takes, and its kernels keep to what a multiprocessor has. Compiling needs no GPU."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.cpu_compiler import PLAIN as CPU_TOOLCHAIN
from tests.kernels.cpu_compiler import cache_folder, load
from thinwire.files import write_bytes
from thinwire.kernels.cuda import (
    columns,
    decode_parts,
    dense,
    draw,
    multi_block_rows,
    restore,
    row_select,
    second_moment,
    signs,
)
from thinwire.kernels.cuda import rows as streamed_rows
from thinwire.kernels.cuda.agreed import agreed_defines
from thinwire.kernels.cuda.binaries import OPTIONS
from thinwire.kernels.cuda.bucket import bucket_defines
from thinwire.kernels.cuda.entries import entries_defines
from thinwire.kernels.cuda.fused_estimate import MEASURE_DEFINES
from thinwire.kernels.cuda.fused_threshold import DECODE_DEFINES, ENCODE_DEFINES
from thinwire.kernels.cuda.fused_topk import SETTLE_DEFINES, Correction, ScaledStep
from thinwire.kernels.cuda.pack import pack_defines
from thinwire.kernels.cuda.prepared import payload_defines
from thinwire.kernels.cuda.quantize import Scaling, quantize_defines
from thinwire.kernels.cuda.register_rows import SHORT_ROWS, RegisterRows, shape_bit
from thinwire.kernels.cuda.source import SOURCES, Defines, source_of
from thinwire.kernels.cuda.split_tables import split_defines
from thinwire.kernels.cuda.structs import Row, declare, i32, i64, layout_of
from thinwire.kernels.cuda.toolchain import use_toolchain
from thinwire.kernels.cuda.tree import tree_defines
from thinwire.lowrank.cuda.kernels import FILES, Kernels
from thinwire.lowrank.cuda.kernels import SOURCES as LOWRANK

PLAIN = payload_defines(torch.bfloat16, torch.float32, packed=False)
MOMENTUM = (*PLAIN, *Correction(0.9, nesterov=False, masking=True).defines)
NESTEROV = (*PLAIN, *Correction(0.9, nesterov=True, masking=False).defines)
NARROW = payload_defines(torch.float16, torch.bfloat16, packed=True)
SCALED = (*PLAIN, *ScaledStep(Scaling(0.9, 1e-8)).defines)
COLLECTED = (*PLAIN, *ScaledStep(Scaling(0.9, 1e-8), collected=True).defines)
NOTES = (*PLAIN, ("NOTE_WORDS", 1))
Case = tuple[str, Defines]


def rows(floats: Defines, *shapes: tuple[int, int]) -> Case:
    """encode_rows.cu for rows of these (warps, elements per lane)."""
    warps = max(SHORT_ROWS, *(warps for warps, _ in shapes))
    bits = sum(1 << shape_bit(*shape) for shape in shapes)
    nothing = torch.zeros(0)
    return "encode_rows.cu", (*floats, *RegisterRows(warps, bits, *[nothing] * 3).defines)


def low_rank(file: str, rank: int) -> Case:
    with use_toolchain("cpu", CPU_TOOLCHAIN):
        defines = Kernels(torch.device("cpu"), rank, torch.float32).defines(file)
    return str(LOWRANK / file), (*defines, ("FRESH", 1))


def quantise(bits: int, block: int, gradients: torch.dtype, **options: Any) -> Defines:
    return quantize_defines(bits, block, gradients, stochastic=False, keeps=True, **options)


CASES: dict[str, Case] = {
    "rows of 1024": rows(PLAIN, (1, 32)),
    "rows of 1024 and 4096": rows(PLAIN, (1, 32), (4, 32)),
    "rows of 1024 and 4096, momentum": rows(MOMENTUM, (1, 32), (4, 32)),
    "rows of 1024 and 4096, in a scale": rows(SCALED, (1, 32), (4, 32)),
    "rows of 1024 and 4096, in a refreshed scale": rows(COLLECTED, (1, 32), (4, 32)),
    "rows of 64 to 4608, in a scale": rows(
        SCALED, (1, 4), (1, 8), (1, 20), (1, 36), (4, 20), (4, 36)
    ),
    "rows of 10240, in a scale": rows(SCALED, (8, 40)),
    "rows of 32768, in a scale": rows(SCALED, (16, 64)),
    "rows of 1024 and 4096, packed": rows(NARROW, (1, 32), (4, 32)),
    "rows of 64 to 4608": rows(PLAIN, (1, 4), (1, 8), (1, 20), (1, 36), (4, 20), (4, 36)),
    "rows of 10240": rows(PLAIN, (8, 40)),
    "rows of 32768": rows(PLAIN, (16, 64)),
    "columns": ("encode_columns.cu", (*PLAIN, *columns.DEFINES)),
    "columns, momentum": ("encode_columns.cu", (*MOMENTUM, *columns.DEFINES)),
    "columns, Nesterov": ("encode_columns.cu", (*NESTEROV, *columns.DEFINES)),
    "columns, in a scale": ("encode_columns.cu", (*SCALED, *columns.DEFINES)),
    "columns, in a refreshed scale": ("encode_columns.cu", (*COLLECTED, *columns.DEFINES)),
    "columns, packed": ("encode_columns.cu", (*NARROW, *columns.DEFINES)),
    "few of a row": ("stream_rows.cu", (*PLAIN, *streamed_rows.DEFINES)),
    "few of a row, momentum": ("stream_rows.cu", (*MOMENTUM, *streamed_rows.DEFINES)),
    "few of a row, in a scale": ("stream_rows.cu", (*SCALED, *streamed_rows.DEFINES)),
    "few of a row, in a refreshed scale": (
        "stream_rows.cu",
        (*COLLECTED, *streamed_rows.DEFINES),
    ),
    "few of a row, packed": ("stream_rows.cu", (*NARROW, *streamed_rows.DEFINES)),
    "multi-block rows": ("encode_multi_block_rows.cu", (*PLAIN, *multi_block_rows.DEFINES)),
    "multi-block rows, momentum": (
        "encode_multi_block_rows.cu",
        (*MOMENTUM, *multi_block_rows.DEFINES),
    ),
    "multi-block rows, Nesterov": (
        "encode_multi_block_rows.cu",
        (*NESTEROV, *multi_block_rows.DEFINES),
    ),
    "multi-block rows, in a scale": (
        "encode_multi_block_rows.cu",
        (*SCALED, *multi_block_rows.DEFINES),
    ),
    "multi-block rows, in a refreshed scale": (
        "encode_multi_block_rows.cu",
        (*COLLECTED, *multi_block_rows.DEFINES),
    ),
    "multi-block rows, decisions": (
        "decide_multi_block_rows.cu",
        (*PLAIN, *multi_block_rows.DEFINES),
    ),
    "multi-block rows, decisions in a scale": (
        "decide_multi_block_rows.cu",
        (*SCALED, *multi_block_rows.DEFINES),
    ),
    "thresholds": ("encode_threshold.cu", (*NOTES, *ENCODE_DEFINES)),
    "measures": ("measure.cu", (*PLAIN, *MEASURE_DEFINES)),
    "measures of narrow gradients": ("measure.cu", (*NARROW, *MEASURE_DEFINES)),
    "decode": ("decode.cu", (*PLAIN, *decode_parts.DEFINES, *dense.STRETCH_DEFINES)),
    "decode packed": ("decode.cu", (*NARROW, *decode_parts.DEFINES, *dense.STRETCH_DEFINES)),
    "decode counted": ("decode_counted.cu", (*NOTES, *DECODE_DEFINES)),
    "settle": ("settle.cu", (*MOMENTUM, *SETTLE_DEFINES)),
    "settle, in a scale": ("settle.cu", (*SCALED, *SETTLE_DEFINES)),
    "bucket": ("bucket.cu", bucket_defines(torch.float32)),
    "bf16 bucket": ("bucket.cu", bucket_defines(torch.bfloat16)),
    "rows selected": ("select_rows.cu", row_select.DEFINES),
    "drawn places": ("draw.cu", draw.DEFINES),
    "dense": ("dense.cu", (*PLAIN, *dense.STRETCH_DEFINES)),
    "signs": ("signs.cu", signs.DEFINES),
    "restore": ("restore.cu", restore.DEFINES),
    "second moment": ("second_moment.cu", second_moment.DEFINES),
    **{
        f"quantised, {bits} bits in {block}, {dtype}": ("quantize.cu", quantise(bits, block, dtype))
        for bits, block, dtype in (
            (16, 128, torch.float32),
            (8, 64, torch.float16),
            (8, 128, torch.float32),
            (4, 128, torch.float32),
            (4, 128, torch.bfloat16),
            (2, 128, torch.float32),
            (1, 128, torch.float32),
            (1, 256, torch.bfloat16),
        )
    },
    **{
        f"quantised, {bits} bits, sums in {sum_bits}": (
            "quantize.cu",
            quantise(bits, 128, torch.float32, sum_bits=sum_bits),
        )
        for bits, sum_bits in ((1, 8), (1, 2), (4, 16))
    },
    **{
        f"quantised, {bits} bits in {block}, sums in {sum_bits}, {dtype}, in Adam's scale": (
            "quantize.cu",
            quantise(bits, block, dtype, sum_bits=sum_bits, scaled=True),
        )
        for bits, block, sum_bits, dtype in (
            (1, 128, 1, torch.float32),
            (1, 128, 8, torch.float32),
            (1, 256, 2, torch.bfloat16),
            (2, 128, 2, torch.float32),
            (2, 256, 2, torch.float32),
            (4, 64, 4, torch.float16),
            (4, 128, 4, torch.float32),
            (8, 256, 8, torch.float32),
        )
    },
    "quantised, stochastic, in Adam's scale": (
        "quantize.cu",
        quantize_defines(2, 128, torch.float32, stochastic=True, keeps=True, scaled=True),
    ),
    "quantised, stochastic": (
        "quantize.cu",
        quantize_defines(4, 128, torch.float32, stochastic=True, keeps=False),
    ),
    "entries": ("entries.cu", entries_defines(torch.float32)),
    "bf16 entries": ("entries.cu", entries_defines(torch.bfloat16)),
    "agreed": ("agreed.cu", agreed_defines(torch.float32)),
    "agreed, bf16": ("agreed.cu", agreed_defines(torch.bfloat16)),
    "agreed, fp16": ("agreed.cu", agreed_defines(torch.float16)),
    "split": ("split.cu", split_defines(torch.float32)),
    "split, bf16": ("split.cu", split_defines(torch.bfloat16)),
    "tree": ("tree.cu", tree_defines(torch.float32)),
    "tree, bf16": ("tree.cu", tree_defines(torch.bfloat16)),
    "bf16 memory": ("pack.cu", pack_defines(torch.bfloat16)),
    "int8 memory": ("pack.cu", pack_defines(torch.int8)),
}
LOW_RANK: dict[str, Case] = {
    f"low rank {file} {rank}": low_rank(file, rank)
    for file, rank in (
        ("products.cu", 4),
        ("products.cu", 16),
        ("orthogonalise.cu", 4),
        ("orthogonalise_wide.cu", 16),
    )
}
FEW_SPILLS = 64
"""Bytes per thread: those of the longest rows, which have all registers there are."""
BARRIERS = 5
"""Of a block. One that might use all sixteen keeps others from its multiprocessor."""


class Nvrtc:
    """The compiler, from the wheel that torch's CUDA builds depend on."""

    def __init__(self, path: Path) -> None:
        # Older ones look for their builtins on the library path only, unless they are loaded already.
        for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(str(path))
        self._name = f"{path.name} {path.stat().st_size}"

    def compile(self, source: str, architecture: str) -> str:
        """The assembler's report; kept for later runs, as the kernels for the CPU are."""
        parts = (source, architecture, OPTIONS, self._name)
        kept = cache_folder() / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.txt"
        if kept.exists():
            kept.touch()
        else:
            report = self._compile(source, architecture)
            write_bytes(kept, report.encode())
        return kept.read_text()

    def _compile(self, source: str, architecture: str) -> str:
        program = ctypes.c_void_p()
        self._call("CreateProgram", ctypes.byref(program), source.encode(), b"k.cu", 0, None, None)
        options = [f"--gpu-architecture={architecture}", *OPTIONS, "--ptxas-options=-v"]
        texts = (ctypes.c_char_p * len(options))(*map(str.encode, options))
        code = self._library.nvrtcCompileProgram(program, len(options), texts)
        size = ctypes.c_size_t()
        self._call("GetProgramLogSize", program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self._call("GetProgramLog", program, log)
        self._call("DestroyProgram", ctypes.byref(program))
        assert code == 0, log.value.decode()
        return log.value.decode()

    def _call(self, name: str, *args: object) -> None:
        assert getattr(self._library, f"nvrtc{name}")(*args) == 0, name


@functools.cache
def find_nvrtc() -> Nvrtc | None:
    try:
        import nvidia
    except ImportError:
        return None
    found = [
        path for folder in nvidia.__path__ for path in Path(folder).glob("*/lib/libnvrtc.so.*")
    ]
    return Nvrtc(min(found)) if found else None


@pytest.fixture
def nvrtc() -> Nvrtc:
    found = find_nvrtc()
    if found is None:
        pytest.skip("needs NVRTC, which comes with torch's CUDA builds or nvidia-cuda-nvrtc")
    return found


def check(report: str) -> None:
    assert "Compiling entry function" in report
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill stores", report)]
    frames = [int(number) for number in re.findall(r"(\d+) bytes stack frame", report)]
    assert spilled and max(*spilled, *frames) <= FEW_SPILLS, report
    assert all(int(n) <= BARRIERS for n in re.findall(r"used (\d+) barriers", report)), report


@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_and_stay_in_registers(nvrtc, name):
    check(nvrtc.compile(source_of(*CASES[name]), "sm_90"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in CASES if not name.startswith(("rows", "columns"))]
)
def test_what_needs_few_registers_compiles_for_older_devices(nvrtc, name):
    check(nvrtc.compile(source_of(*CASES[name]), "sm_80"))


@pytest.mark.parametrize("name", LOW_RANK)
def test_low_rank_compiles(nvrtc, name):
    nvrtc.compile(source_of(*LOW_RANK[name]), "sm_90")


def test_no_source_is_left_out():
    assert {path.name for path in SOURCES.glob("*.cu")} == {file for file, _ in CASES.values()}
    assert {path.name for path in LOWRANK.glob("*.cu")} == set(FILES)
    assert {Path(file).name for file, _ in LOW_RANK.values()} == set(FILES)


def test_a_structure_that_python_writes_otherwise_is_refused(capfd):
    file, defines = CASES["columns"]
    swapped = declare("Column", (Row, "row"), (i64, "masks"), (i32, "together number"))
    wrong = tuple(
        layout_of(swapped) if name == "LAYOUT_OF_Column" else (name, value)
        for name, value in defines
    )
    # The oldest NVRTC cannot tell where a field lies; the compiler that all kernels pass in the tests can.
    with pytest.raises(subprocess.CalledProcessError):
        load(file, wrong)
    assert "another Column" in capfd.readouterr().err
