"""One registry says which kernels serve which device; kernels compiled for the CPU are kept between runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.kernels import cpu_compiler
from tests.kernels.cpu_compiler import PLAIN, CpuToolchain, needs_compiler
from thinwire.kernels.cuda.bucket import bucket_defines
from thinwire.kernels.cuda.toolchain import has_kernels, kernels_for, toolchain_of, use_toolchain

CPU = torch.device("cpu")
DROP = ("bucket.cu", "drop_non_finite", bucket_defines(torch.float32))


def test_a_device_without_a_toolchain_has_no_kernels():
    assert kernels_for(CPU) is None and not has_kernels(CPU)
    assert kernels_for(torch.device("meta")) is None
    with pytest.raises(AssertionError, match="no kernels for cpu"):
        toolchain_of(CPU)


def test_a_toolchain_serves_inside_a_context_only():
    with use_toolchain("cpu", PLAIN):
        assert kernels_for(CPU) is PLAIN and has_kernels(CPU)
        with use_toolchain("cpu", None):
            assert kernels_for(CPU) is None
        assert toolchain_of(CPU) is PLAIN
    assert kernels_for(CPU) is None


def test_a_toolchain_may_refuse_a_device():
    class Choosy(CpuToolchain):
        def serves(self, device):
            return device.index == 1

    with use_toolchain("cpu", Choosy()):
        assert kernels_for(CPU) is None
        assert kernels_for(torch.device("cpu", 1)) is not None


def drops() -> bool:
    values = torch.full((300,), torch.inf)
    PLAIN.compile(*DROP)(1, 64, [values, torch.tensor(True), 300])
    return not values.any()


@needs_compiler
def test_two_at_once_build_the_same_kernel(monkeypatch, tmp_path):
    monkeypatch.setenv("THINWIRE_TEST_CACHE", str(tmp_path / "cache"))
    file, _, defines = DROP
    library, source = cpu_compiler.kept(file, defines), cpu_compiler.source_of(file, defines)
    with ThreadPoolExecutor(2) as both:
        list(both.map(cpu_compiler.build, [source] * 2, [library] * 2))
    assert list(library.parent.iterdir()) == [library]


@needs_compiler
def test_a_later_run_finds_the_kernel_there(monkeypatch, tmp_path):
    monkeypatch.setenv("THINWIRE_TEST_CACHE", str(tmp_path / "cache"))
    cpu_compiler.load.cache_clear()
    assert drops()
    (made,) = (tmp_path / "cache").iterdir()
    before = made.stat().st_ino
    cpu_compiler.load.cache_clear()
    assert drops() and made.stat().st_ino == before
    cpu_compiler.load.cache_clear()
