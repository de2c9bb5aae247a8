"""What each lab created, on disk, so that a killed lab can be cleaned up and no other touched."""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

LAB_NAME = re.compile(r"tw[0-9a-f]{8}")

_RUN_DIRECTORY = Path("/run/thinwire")


def run_directory() -> Path:
    """Return the folder of the records, created if missing; THINWIRE_RUN_DIR overrides it."""
    folder = Path(os.environ.get("THINWIRE_RUN_DIR", _RUN_DIRECTORY))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


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
            records.append(Record(**json.loads(path.read_text())))
        except FileNotFoundError:  # that lab has just closed
            continue
    return records


def process_start(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name, in parentheses, may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
