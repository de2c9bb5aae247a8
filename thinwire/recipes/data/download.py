"""Download: a file from its official place, checked before anybody can read it."""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from thinwire.errors import UsageError
from thinwire.files import replacing
from thinwire.recipes.data.source import Remote, reading

CHUNK = 1 << 20
TIMEOUT_SECONDS = 60.0
SCHEMES = ("https", "file")
"""Nobody on the way can change what comes by these."""


def fetch(remote: Remote, folder: Path, schemes: Sequence[str] = SCHEMES) -> None:
    """Put a remote file into the folder, checked, and unpack it if it is an archive.

    1. A file that is there already is not fetched again, only checked: it may have been carried here by hand.
    2. Fetch beside the target and rename: a reader never meets half a file, an interrupted fetch leaves nothing.
    3. On a wrong checksum the fetched file is removed.
    4. An archive is unpacked; it goes if it was fetched, and stays if it was there.
    """
    target = folder / remote.path
    carried = target.exists()
    if carried:
        with target.open("rb") as file:
            check(file, remote.checksum, str(target), "remove it and fetch it again")
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            transfer(remote.url, file, schemes)
            file.seek(0)
            what = f"what came from {remote.url}"
            check(file, remote.checksum, what, "it was removed, try again")
    if remote.unpack:
        unpack(target, folder)
        if not carried:
            target.unlink()


class SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirections that stay encrypted."""

    def redirect_request(self, *call: Any) -> urllib.request.Request | None:
        check_scheme(call[-1], ("https",))
        return super().redirect_request(*call)


def check_scheme(url: str, allowed: Sequence[str]) -> None:
    if urllib.parse.urlsplit(url).scheme not in allowed:
        raise UsageError(f"{url} cannot be fetched; only https is safe on the way")


def transfer(url: str, file: BinaryIO, schemes: Sequence[str]) -> None:
    check_scheme(url, schemes)
    # Some hosts turn away what does not name itself.
    request = urllib.request.Request(url, headers={"User-Agent": "thinwire"})
    opener = urllib.request.build_opener(SafeRedirects)
    try:
        with opener.open(request, timeout=TIMEOUT_SECONDS) as response:
            size = declared_size(response.headers.get("Content-Length"))
            with progress(PurePath(url).name, size) as advance:
                while chunk := response.read(CHUNK):
                    file.write(chunk)
                    advance(len(chunk))
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{url} cannot be fetched ({error}); fetch it elsewhere and put it in the data folder, or use --synthetic"
        ) from error


def declared_size(header: str | None) -> int | None:
    """Only for the bar: what is no number is not believed."""
    return int(header) if header is not None and header.isascii() and header.isdigit() else None


@contextmanager
def progress(name: str, size: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; nothing in a log or without rich."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
    except ImportError:
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(file=sys.stderr)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(name, total=size)
        yield lambda count: bar.advance(task, count)


def check(file: BinaryIO, checksum: str, what: str, remedy: str) -> None:
    """Compare a file with its checksum, 'md5:...' or 'sha256:...'."""
    kind, _, wanted = checksum.partition(":")
    digest = hashlib.new(kind, usedforsecurity=False)
    while chunk := file.read(CHUNK):
        digest.update(chunk)
    if digest.hexdigest() != wanted:
        raise UsageError(
            f"{what} has the {kind} {digest.hexdigest()}, but {wanted} is the official one; {remedy}"
        )


def unpack(path: Path, folder: Path) -> None:
    """Unpack a tar or zip archive; nothing is written outside the folder."""
    with reading(path, "an archive"):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                # It drops drive letters, leading slashes and '..' by itself.
                archive.extractall(folder)
            return
        try:
            with tarfile.open(path) as tar:
                if hasattr(tarfile, "data_filter"):
                    tar.extractall(folder, filter="data")
                else:
                    tar.extractall(folder, members=plain_members(tar, folder))
        except tarfile.TarError as error:
            raise ValueError(str(error)) from error


def plain_members(tar: tarfile.TarFile, folder: Path) -> list[tarfile.TarInfo]:
    """What `filter="data"` does, for a Python without it: files and folders inside `folder`, with harmless modes."""
    members = tar.getmembers()
    inside = folder.resolve()
    for member in members:
        if not (member.isreg() or member.isdir()):
            raise ValueError(f"{member.name} is neither a file nor a folder")
        if not (inside / member.name).resolve().is_relative_to(inside):
            raise ValueError(f"{member.name} is outside the folder")
        member.mode = 0o755 if member.isdir() else 0o644
        member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
    return members


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Make the folder; one process of this machine at a time, because the workers of a job all look for the same files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not emptied, and no link is followed: others may write to a folder of data.
        flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        file = os.fdopen(os.open(folder / ".thinwire-download", flags, 0o666), "wb")
    except OSError as error:
        raise UsageError(
            f"data_dir is {str(folder)!r}; it must be a folder to write to, if something is to be fetched ({error})"
        ) from error
    with file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
