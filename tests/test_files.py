"""Files are written as a whole, to the disk, and never through a link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from thinwire.files import partial_files, replacing, write_bytes


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")
    with pytest.raises(RuntimeError), replacing(path) as file:
        file.write(b"new")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_content_and_name_are_on_the_disk_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "file", []
    sync = os.fsync

    def watched(descriptor: int) -> None:
        what = Path(f"/proc/self/fd/{descriptor}").readlink()
        seen.append(("folder" if what.is_dir() else "file", path.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    write_bytes(path, b"content")
    assert seen == [("file", False), ("folder", True)]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_bytes(b"mine")
    path.symlink_to(victim)
    write_bytes(path, b"new")
    assert victim.read_bytes() == b"mine" and not path.is_symlink()


def test_names_of_partial_files_cannot_be_foreseen(tmp_path: Path) -> None:
    names = set()
    for _ in range(3):
        with replacing(tmp_path / "file"):
            (partial,) = partial_files(tmp_path / "file")
            names.add(partial.name)
    assert len(names) == 3 and not any(str(os.getpid()) == one.split(".")[-1] for one in names)
