"""Every CUDA source is one that NVRTC takes, and its kernels keep to what a multiprocessor has. Compiling needs no GPU."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

import pytest

from thinwire.kernels.cuda.binaries import OPTIONS
from thinwire.kernels.cuda.launch import SOURCES, source_of
from thinwire.kernels.cuda.tables import SHORT_ROWS, shape_bit
from thinwire.lowrank.cuda.kernels import SOURCES as LOWRANK

PLAIN = {"VALUE_CODE": 1, "GRADIENT_CODE": 0, "PACKED": 0}
MOMENTUM = {**PLAIN, "MOMENTUM": 1, "MASKING": 1}
NESTEROV = {**PLAIN, "MOMENTUM": 2, "MASKING": 0}
NARROW = {"VALUE_CODE": 2, "GRADIENT_CODE": 1, "PACKED": 1}
THRESHOLD = {**PLAIN, "NOTE_WORDS": 1}


def rows(*shapes: tuple[int, int]) -> dict[str, int]:
    """Of these (warps, elements per lane)."""
    team = max(SHORT_ROWS, *(warps for warps, _ in shapes))
    return {"TEAM": team, "SHAPES": sum(1 << shape_bit(*shape) for shape in shapes)}


ROWS = {
    "rows of 1024": {**PLAIN, **rows((1, 32))},
    "rows of 1024 and 4096": {**PLAIN, **rows((1, 32), (4, 32))},
    "rows of 1024 and 4096, momentum": {**MOMENTUM, **rows((1, 32), (4, 32))},
    "rows of 1024 and 4096, packed": {**NARROW, **rows((1, 32), (4, 32))},
    "rows of 64 to 4608": {**PLAIN, **rows((1, 4), (1, 8), (1, 20), (1, 36), (4, 20), (4, 36))},
    "rows of 10240": {**PLAIN, **rows((8, 40))},
    "rows of 32768": {**PLAIN, **rows((16, 64))},
}
COLUMNS = {
    "columns": PLAIN,
    "columns, momentum": MOMENTUM,
    "columns, Nesterov": NESTEROV,
    "columns, packed": NARROW,
}
OTHERS = {
    "few of a row": ("stream_rows.cu", PLAIN),
    "few of a row, momentum": ("stream_rows.cu", MOMENTUM),
    "few of a row, packed": ("stream_rows.cu", NARROW),
    "giants": ("encode_giants.cu", PLAIN),
    "giants, momentum": ("encode_giants.cu", MOMENTUM),
    "giants, Nesterov": ("encode_giants.cu", NESTEROV),
    "giants, decisions": ("decide_giants.cu", PLAIN),
    "thresholds": ("encode_threshold.cu", THRESHOLD),
    "decode": ("decode.cu", PLAIN),
    "decode packed": ("decode.cu", NARROW),
    "decode counted": ("decode_counted.cu", THRESHOLD),
    "settle": ("settle.cu", MOMENTUM),
    "dense": ("dense.cu", PLAIN),
    "bf16 memory": ("pack.cu", {"PACK_CODE": 1}),
    "int8 memory": ("pack.cu", {"PACK_CODE": 2}),
}
LOW_RANK = (
    ("products.cu", 4),
    ("products.cu", 16),
    ("orthogonalise.cu", 4),
    ("orthogonalise_wide.cu", 16),
)
FEW_SPILLS = 64
"""Bytes per thread: those of the longest rows, which have all registers there are."""
BARRIERS = 5
"""Of a block. One that might use all sixteen keeps others from its multiprocessor."""


class Nvrtc:
    """The compiler, from the wheel that torch's CUDA builds depend on."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def compile(self, source: str, architecture: str) -> str:
        """The assembler's report."""
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


@pytest.mark.parametrize("name", ROWS)
def test_rows_compile_and_stay_in_registers(nvrtc, name):
    check(nvrtc.compile(source_of("encode_rows.cu", tuple(ROWS[name].items())), "sm_90"))


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_compile_and_stay_in_registers(nvrtc, name):
    check(nvrtc.compile(source_of("encode_columns.cu", tuple(COLUMNS[name].items())), "sm_90"))


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_compiles(nvrtc, name):
    file, defines = OTHERS[name]
    check(nvrtc.compile(source_of(file, tuple(defines.items())), "sm_80"))


@pytest.mark.parametrize(("file", "rank"), LOW_RANK)
def test_low_rank_compiles(nvrtc, file, rank):
    defines = {"VALUE_CODE": 0, "GRADIENT_CODE": 0, "RANK": rank, "FRESH": 1}
    nvrtc.compile(source_of(str(LOWRANK / file), tuple(defines.items())), "sm_90")


def test_no_source_is_left_out():
    named = {"encode_rows.cu", "encode_columns.cu", *(file for file, _ in OTHERS.values())}
    assert {path.name for path in SOURCES.glob("*.cu")} == named
    assert {path.name for path in LOWRANK.glob("*.cu")} == {file for file, _ in LOW_RANK}
