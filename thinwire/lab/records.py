"""What each lab created, on disk, so that a killed lab can be cleaned up and no other touched."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from thinwire.errors import UsageError

LAB_NAME = re.compile(r"tw[0-9a-f]{8}")

_RUN_DIRECTORY = Path("/run/thinwire")


def run_directory() -> Path:
    """Return the folder of the records, created if missing; THINWIRE_RUN_DIR overrides it.

    What a record names is removed by root, so nobody else may write there. Others may pass through, to a daemon's pipe.
    """
    folder = Path(os.environ.get("THINWIRE_RUN_DIR", _RUN_DIRECTORY))
    folder.mkdir(mode=0o711, parents=True, exist_ok=True)
    if not is_own(folder, stat.S_ISDIR):
        raise UsageError(
            f"the folder of lab records is '{folder}'; it must belong to you, be no link, and be closed to other writers."
        )
    return folder


def is_own(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Whether it is of that kind, belongs to this process's user, and nobody else can write to it."""
    status = path.lstat()
    mine = status.st_uid == os.geteuid()
    return mine and is_kind(status.st_mode) and not status.st_mode & 0o022


@dataclass
class Record:
    """One lab's creations, written before each of them exists.

    `namespaces` maps a name to the inode of the namespace behind it, None until it is created: a
    namespace of that name with another inode belongs to somebody else.
    """

    name: str
    network: str
    owner: int
    owner_started: int
    namespaces: dict[str, int | None] = field(default_factory=dict)
    mps_directory: str | None = None

    @classmethod
    def open(cls, name: str, network: str) -> Record:
        """Reserve `name` for this process; FileExistsError if another lab has it."""
        owner = os.getpid()
        record = cls(name, network, owner, process_start(owner) or 0)
        temporary = record._write_temporary()
        try:
            record.path.hardlink_to(temporary)
        finally:
            temporary.unlink()
        return record

    @property
    def path(self) -> Path:
        """The file of this record."""
        return run_directory() / f"{self.name}.json"

    @property
    def owner_alive(self) -> bool:
        """Whether the process that made the lab still runs (a reused process id does not count)."""
        return process_start(self.owner) == self.owner_started

    def save(self) -> None:
        """Replace the file in one step, so that a kill leaves the old or the new text."""
        self._write_temporary().replace(self.path)

    def close(self) -> None:
        """Forget the lab; everything it created is gone."""
        hosts_file(self.name).unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def _write_temporary(self) -> Path:
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=".", suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(self), file)
        return Path(temporary)


def hosts_file(lab: str) -> Path:
    """Return where the host names of a lab are written."""
    return run_directory() / f"{lab}.hosts"


def load_records() -> list[Record]:
    """Return the records of this machine, living labs and dead ones."""
    records = []
    for path in sorted(run_directory().glob("tw*.json")):
        try:
            records.append(_read_record(path))
        except FileNotFoundError:  # that lab has just closed
            continue
    return records


def _read_record(path: Path) -> Record:
    """UsageError for a file that no lab of this user has written."""
    if not is_own(path, stat.S_ISREG):
        raise UsageError(
            f"the lab record '{path}' was not written by you; remove it by hand if you know what it is."
        )
    try:
        record = Record(**json.loads(path.read_text()))
        whole = isinstance(record.owner, int) and all(
            isinstance(name, str) and (inode is None or isinstance(inode, int))
            for name, inode in record.namespaces.items()
        )
    except (ValueError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole or record.path != path or LAB_NAME.fullmatch(record.name) is None:
        raise UsageError(
            f"the lab record '{path}' is damaged; look with `ip netns` for what its lab left, and remove it by hand."
        )
    return record


def process_start(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name, in parentheses, may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
