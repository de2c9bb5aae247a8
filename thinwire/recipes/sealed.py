"""Sealed files: what `torch.save` writes, and a last line with its SHA-256. `torch.load` reads them as they are."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, BinaryIO

import torch

from thinwire.files import replacing

MARK = b"\nthinwire sha256 "
SEAL_BYTES = len(MARK) + 64 + 1
CHUNK = 1 << 20


class DamagedFile(ValueError):
    """A file whose seal is missing or broken."""


class Sealing:
    """Passes on what is written, and remembers its checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.refusal: OSError | None = None
        """What the disk said; torch hides it behind an error of its own."""

    def write(self, part: Any) -> int:
        self._digest.update(part)
        try:
            return self._file.write(part)
        except OSError as error:
            self.refusal = error
            raise

    def flush(self) -> None:
        self._file.flush()

    def seal(self) -> None:
        self._file.write(MARK + self._digest.hexdigest().encode() + b"\n")


def save_sealed(path: Path, content: Any) -> None:
    """Put `content` at `path`, as a whole or not at all; OSError if the disk refuses."""
    with replacing(path) as file:
        sealing = Sealing(file)
        try:
            torch.save(content, sealing)  # type: ignore[arg-type]
        except RuntimeError:
            if sealing.refusal is None:
                raise
            raise sealing.refusal from None
        sealing.seal()


def check_seal(path: Path) -> None:
    """Raise DamagedFile unless every byte is as it was written."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        left = path.stat().st_size - SEAL_BYTES
        while left > 0 and (part := file.read(min(CHUNK, left))):
            digest.update(part)
            left -= len(part)
        seal = file.read()
    if not seal.startswith(MARK):
        raise DamagedFile("it does not end with a checksum")
    if seal != MARK + digest.hexdigest().encode() + b"\n":
        raise DamagedFile("its content does not fit its checksum")


def load_sealed(path: Path) -> Any:
    """Plain tensors and values only."""
    return torch.load(path, map_location="cpu", weights_only=True)
