"""Download: a file from its official place, checked before anybody can read it."""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

from thinwire.errors import UsageError
from thinwire.recipes.data.source import Remote, reading

CHUNK = 1 << 20
TIMEOUT_SECONDS = 60.0


def fetch(remote: Remote, folder: Path) -> None:
    """Put a remote file into the folder, checked, and unpack it if it is an archive.

    1. A file that is there already is not fetched again, only checked: it may have been carried here by hand.
    2. Fetch beside the target and rename: a reader never meets half a file, an interrupted fetch leaves nothing.
    3. On a wrong checksum the fetched file is removed.
    4. An archive is unpacked; it goes if it was fetched, and stays if it was there.
    """
    target = folder / remote.path
    carried = target.exists()
    if carried:
        check(target, remote.checksum)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            transfer(remote.url, partial)
            check(partial, remote.checksum, source=remote.url)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    if remote.unpack:
        unpack(target, folder)
        if not carried:
            target.unlink()


def transfer(url: str, path: Path) -> None:
    # Some hosts turn away what does not name itself.
    request = urllib.request.Request(url, headers={"User-Agent": "thinwire"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            size = response.headers.get("Content-Length")
            with path.open("wb") as file, progress(path.name, size and int(size)) as advance:
                while chunk := response.read(CHUNK):
                    file.write(chunk)
                    advance(len(chunk))
    except (OSError, HTTPException) as error:
        raise UsageError(
            f"{url} cannot be fetched ({error}); fetch it elsewhere and put it in the data folder, or use --synthetic"
        ) from error


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


def check(path: Path, checksum: str, source: str | None = None) -> None:
    """Compare a file with its checksum, 'md5:...' or 'sha256:...'."""
    kind, _, wanted = checksum.partition(":")
    digest = hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != wanted:
        what = f"what came from {source}" if source else str(path)
        raise UsageError(
            f"{what} has the {kind} {digest.hexdigest()}, but {wanted} is the official one; "
            f"{'it was removed, try again' if source else 'remove it and fetch it again'}"
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
                tar.extractall(folder, filter="data")
        except tarfile.TarError as error:
            raise ValueError(str(error)) from error


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Make the folder; one process of this machine at a time, because the workers of a job all look for the same files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".thinwire-download").open("wb")
    except OSError as error:
        raise UsageError(
            f"data_dir is {str(folder)!r}; it must be a folder to write to, if something is to be fetched ({error})"
        ) from error
    with file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
