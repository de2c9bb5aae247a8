"""The folder in which compiled kernels are kept: this user's own, and every file checked before it is loaded into a GPU.

Whoever can write there can run code as this user. So the folder must belong to the user and be closed to others, links are not
followed, and a file begins with the SHA-256 of the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

from thinwire.files import BINARY, write_bytes

logger = logging.getLogger(__name__)

NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""A pipe in the place of a file is not waited for."""
DIGEST_BYTES = hashlib.sha256().digest_size


def cache_folder() -> Path | None:
    """`$THINWIRE_CACHE`, or a folder in the user's cache; None where the user has no home, as in some containers."""
    own = os.environ.get("THINWIRE_CACHE")
    if own:
        return Path(own)
    users = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(users) if users else Path.home() / ".cache") / "thinwire" / "kernels"
    except RuntimeError:
        return None


def read_binary(name: str) -> bytes | None:
    """What was kept under a name; None if nothing was, or if it is not as it was written."""
    folder = cache_folder()
    if folder is None or not _is_own(folder):
        return None
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | BINARY | NO_LINKS)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not _belongs_to_user(os.fstat(descriptor), stat.S_ISREG):
            return None
        content = file.read()
    digest, binary = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return binary if binary and hashlib.sha256(binary).digest() == digest else None


def keep_binary(name: str, binary: bytes) -> None:
    """Keep it for the next process, if there is a folder to keep it in. The ranks of a host do so at the same moment."""
    folder = cache_folder()
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if _is_own(folder):
            write_bytes(folder / name, hashlib.sha256(binary).digest() + binary)


def _is_own(folder: Path) -> bool:
    """Whether only this user can write there. Others lose the right to look."""
    try:
        status = folder.lstat()
        if not _belongs_to_user(status, stat.S_ISDIR):
            logger.warning(
                "compiled kernels are not kept: '%s' must be a folder of this user's own, to which nobody else can write",
                folder,
            )
            return False
        if stat.S_IMODE(status.st_mode) & 0o077:
            folder.chmod(0o700)
    except OSError:
        return False
    return True


def _belongs_to_user(status: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    if not is_kind(status.st_mode):
        return False
    # Windows has no owner and no mode here; a user's folders there are closed to others.
    return not hasattr(os, "geteuid") or (
        status.st_uid == os.geteuid() and not status.st_mode & 0o022
    )
