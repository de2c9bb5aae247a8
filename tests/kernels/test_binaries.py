"""Compiled sources are kept between processes. NVRTC needs a GPU, so that a stand-in compiles here."""

from __future__ import annotations

import os
import shutil
import stat
from types import SimpleNamespace

import pytest
import torch
from torch.cuda import _utils as torch_utils

from thinwire.kernels.cuda import binaries, cache
from thinwire.kernels.cuda.source import SOURCES, source_of

SOURCE = 'extern "C" __global__ void first(int* x) {}\nextern "C" __global__ void second(int* x) {}'


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Names that were compiled for, in a cache folder of this test."""
    names: list[str] = []

    def compile_source(source, name, nvcc_options):
        names.append(name)
        return source.encode()[::-1], name

    def load(binary):
        if not binary.startswith(SOURCE.encode()[::-1]):
            raise RuntimeError("the driver does not know this image")
        return SimpleNamespace(image=binary)

    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setattr(torch_utils, "_nvrtc_compile", compile_source)
    monkeypatch.setattr(torch_utils, "_cuda_load_module", load)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    binaries.load_for.cache_clear()
    yield names
    binaries.load_for.cache_clear()


def new_process() -> None:
    binaries.load_for.cache_clear()


def test_a_source_is_compiled_once_for_all_its_kernels_and_processes(compiled):
    assert binaries.load_module(SOURCE) is binaries.load_module(SOURCE)
    new_process()
    binaries.load_module(SOURCE)
    assert compiled == ["first"]
    (file,) = cache.cache_folder().iterdir()
    assert file.suffix == ".bin"


def test_another_device_or_torch_compiles_anew(compiled, monkeypatch):
    binaries.load_module(SOURCE)
    new_process()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    binaries.load_module(SOURCE)
    new_process()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    binaries.load_module(SOURCE)
    assert len(compiled) == 3


@pytest.mark.parametrize("content", [b"", b"cut short"])
def test_a_damaged_file_is_replaced(compiled, content):
    binaries.load_module(SOURCE)
    (file,) = cache.cache_folder().iterdir()
    file.write_bytes(content)
    for _ in range(2):
        new_process()
        binaries.load_module(SOURCE)
    assert len(compiled) == 2


def test_a_folder_that_cannot_be_made_costs_time_only(compiled, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("THINWIRE_CACHE", os.fspath(tmp_path / "file" / "below"))
    for _ in range(2):
        new_process()
        binaries.load_module(SOURCE)
    assert len(compiled) == 2


def test_a_user_without_a_home_has_no_cache(compiled, monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    for name in ("THINWIRE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cache.Path, "home", nowhere)
    assert cache.cache_folder() is None
    binaries.load_module(SOURCE)
    assert compiled == ["first"]


def test_every_source_names_its_first_kernel():
    files = [*SOURCES.glob("*.cu"), *(SOURCES.parents[1] / "lowrank" / "cuda").glob("*.cu")]
    assert len(files) > 8
    for file in files:
        found = binaries.KERNEL.search(source_of(str(file), ()))
        assert found is not None and f"{found[1]}(" in source_of(str(file), ())


def test_a_folder_that_was_copied_is_as_good(compiled, tmp_path, monkeypatch):
    binaries.load_module(SOURCE)
    shutil.copytree(cache.cache_folder(), tmp_path / "copy")
    monkeypatch.setenv("THINWIRE_CACHE", os.fspath(tmp_path / "copy"))
    new_process()
    binaries.load_module(SOURCE)
    assert len(compiled) == 1


# -- nobody gets in ----------------------------------------------------------------------------------------------


def test_the_folder_is_closed_to_others_and_its_files_are_checked(compiled):
    binaries.load_module(SOURCE)
    folder = cache.cache_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (file,) = folder.iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    new_process()
    binaries.load_module(SOURCE)
    assert len(compiled) == 2


def test_a_folder_that_others_can_write_to_is_not_used(compiled, caplog):
    folder = cache.cache_folder()
    folder.mkdir()
    folder.chmod(0o777)
    for _ in range(2):
        new_process()
        binaries.load_module(SOURCE)
    assert len(compiled) == 2 and list(folder.iterdir()) == []
    assert "must be a folder of this user's own" in caplog.text


def test_a_folder_that_others_could_look_into_is_closed(compiled):
    cache.cache_folder().mkdir(mode=0o755)
    binaries.load_module(SOURCE)
    assert stat.S_IMODE(cache.cache_folder().stat().st_mode) == 0o700
    assert len(list(cache.cache_folder().iterdir())) == 1


def test_links_are_not_followed(compiled, tmp_path, monkeypatch):
    binaries.load_module(SOURCE)
    (file,) = cache.cache_folder().iterdir()
    elsewhere = file.rename(tmp_path / "elsewhere")
    file.symlink_to(elsewhere)
    new_process()
    binaries.load_module(SOURCE)
    assert len(compiled) == 2 and not file.is_symlink()

    link = tmp_path / "link"
    link.symlink_to(cache.cache_folder())
    monkeypatch.setenv("THINWIRE_CACHE", os.fspath(link))
    new_process()
    binaries.load_module(SOURCE)
    assert len(compiled) == 3


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give away"
)
def test_what_belongs_to_somebody_else_is_not_used(compiled):
    binaries.load_module(SOURCE)
    (file,) = cache.cache_folder().iterdir()
    os.chown(file, 65534, 65534)
    new_process()
    binaries.load_module(SOURCE)
    assert len(compiled) == 2 and file.stat().st_uid == 0
    os.chown(cache.cache_folder(), 65534, 65534)
    new_process()
    binaries.load_module(SOURCE)
    assert len(compiled) == 3
