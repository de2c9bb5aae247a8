"""Files that are either complete or not there, also after a power cut."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

BINARY = getattr(os, "O_BINARY", 0)
"""Only Windows has another way to open a file."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` at the end of the block; an error leaves what was there.

    1. Write beside the target, under a name that nobody can guess: a link put there beforehand is not followed.
    2. Wait until the content is on the disk, then rename, then wait for the name.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def partial_files(path: Path) -> list[Path]:
    """What a process that was killed in mid-write has left beside `path`, which may have wild cards."""
    return list(path.parent.glob(f".{path.name}.*"))


def _sync_folder(folder: Path) -> None:
    """Some file systems cannot, and no harm is done: the old name or the new one is there."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
