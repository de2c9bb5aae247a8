"""Where a data set lies: its files in their official layouts, found in the data folder or fetched into it."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.recipes.examples import DataOptions
from thinwire.tools.settings.sections import read_file

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
    # Torch's word for a shape that does not fit, and Python's for what is too deep.
    RuntimeError,
    OverflowError,
    MemoryError,
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


def read_source(values: Mapping[str, Any]) -> Source:
    """A source as it stands in sources.toml."""
    layouts = {
        name: tuple(path for pattern in patterns for path in expand_braces(pattern))
        for name, patterns in values["layouts"].items()
    }
    remotes = tuple(Remote(**remote) for remote in values.get("remotes", ()))
    return Source(
        name=values["name"], layouts=layouts, remotes=remotes, obtain=values.get("obtain", "")
    )


def expand_braces(pattern: str) -> list[str]:
    """ "a{b,c}" is "ab" and "ac", as in a shell."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(choice) for choice in itertools.product(*parts)]


SOURCES = {
    name: read_source(values)
    for name, values in read_file(Path(__file__).with_name("sources.toml")).items()
}


def locate(source: Source | str, options: DataOptions) -> Found:
    """The files of a source, or of the one of that name, fetched first if they are missing and the user said so."""
    if isinstance(source, str):
        source = SOURCES[source]
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
    one = len(missing) == 1
    place = f"put {'it' if one else 'them'} there"
    if source.obtain:
        place += f" ({source.obtain})"
    ways = [place, "fetch the set with --download"] if source.remotes else [place]
    return (
        f"{source.name} is not complete in {folder}: {name_some(missing)} {'is' if one else 'are'} missing; "
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
