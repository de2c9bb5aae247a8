"""Where a data set lies: its files in their official layouts, found in the data folder or fetched into it."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import UsageError
from thinwire.recipes.examples import DataOptions

DATA_VARIABLE = "THINWIRE_DATA"
NAMED_FILES = 3
"""So many missing files are named one by one."""

UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
    pickle.UnpicklingError,
)
"""What parsing a file that is not what its name says ends in."""


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A file that can be fetched."""

    url: str
    path: str
    """Where it goes, relative to the data folder."""
    checksum: str
    """Published by its makers or fixed by long use: 'md5:...' or 'sha256:...'."""
    unpack: bool = False
    """An archive, unpacked in the data folder."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set on disk."""

    name: str
    """As in a sentence: CIFAR-10."""
    layouts: Mapping[str, tuple[str, ...]]
    """Sets of files by the name of their layout, the preferred one first; any one complete set will do.

    Paths are relative to the data folder and may have wild cards, which stand for the first match.
    """
    remotes: tuple[Remote, ...] = ()
    """What --download fetches: all files of one layout."""
    obtain: str = ""
    """Where people get it who cannot download it, as an end of a sentence."""


@dataclass(frozen=True)
class Found:
    """The files of one layout, in the order in which the source names them."""

    layout: str
    paths: tuple[Path, ...]


def locate(source: Source, options: DataOptions) -> Found:
    """The files of a source, fetched first if they are missing and the user said so."""
    folder = find_folder(source, options)
    found = find(source, folder)
    if found is None and options.download and source.remotes:
        from thinwire.recipes.data.download import fetch, lock

        with lock(folder):
            # Another worker may have fetched it while this one waited.
            if find(source, folder) is None:
                for remote in source.remotes:
                    fetch(remote, folder)
        found = find(source, folder)
    if found is None:
        raise UsageError(describe_missing(source, folder))
    return found


def find(source: Source, folder: Path) -> Found | None:
    """The first layout of which every file is there."""
    for layout, patterns in source.layouts.items():
        paths = [find_file(folder, pattern) for pattern in patterns]
        there = tuple(path for path in paths if path is not None)
        if len(there) == len(patterns):
            return Found(layout, there)
    return None


def find_file(folder: Path, pattern: str) -> Path | None:
    if "*" in pattern:
        return min(folder.glob(pattern), default=None)
    path = folder / pattern
    return path if path.exists() else None


def find_folder(source: Source, options: DataOptions) -> Path:
    """The data folder: --data-dir, else THINWIRE_DATA; it must exist unless it is made for a download."""
    given = options.data_dir or os.environ.get(DATA_VARIABLE)
    if not given:
        files = name_some(next(iter(source.layouts.values())))
        fetched = ", with --download to fill it," if source.remotes else ""
        raise UsageError(
            f"data_dir is not given, but {source.name} is read from a folder that holds {files}; give it with --data-dir "
            f"or {DATA_VARIABLE}{fetched} or use --synthetic"
        )
    folder = Path(given).expanduser()
    if not folder.is_dir() and not options.download:
        files = name_some(next(iter(source.layouts.values())))
        raise UsageError(
            f"data_dir is {str(folder)!r}; it must be a folder, with {files} in it for {source.name}"
        )
    return folder


def name_some(patterns: Sequence[str]) -> str:
    named = ", ".join(patterns[:NAMED_FILES])
    more = len(patterns) - NAMED_FILES
    return f"{named} and {more} more" if more > 0 else named


def describe_missing(source: Source, folder: Path) -> str:
    """Which files are missing, of the layout that is nearest to complete, and what can be done."""
    missing = min(
        (
            [pattern for pattern in patterns if find_file(folder, pattern) is None]
            for patterns in source.layouts.values()
        ),
        key=len,
    )
    which = "is" if len(missing) == 1 else "are"
    place = f"put {'it' if len(missing) == 1 else 'them'} there"
    if source.obtain:
        place += f" ({source.obtain})"
    ways = [place, "fetch the set with --download"] if source.remotes else [place]
    return (
        f"{source.name} is not complete in {folder}: {name_some(missing)} {which} missing; "
        f"{', '.join(ways)} or use --synthetic"
    )


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turn whatever a damaged file makes its parser raise into one sentence."""
    try:
        yield
    except UsageError:
        raise
    except UNREADABLE as error:
        raise damaged(path, f"it is not {what}: {str(error) or type(error).__name__}") from error


def damaged(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is damaged or of another kind; {why}")
