"""Hosts: the machines of a job, as a file names them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import UsageError

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class Host:
    """A machine and how many workers it gets."""

    name: str
    slots: int | None = None
    """None: as many as the command says."""


def read_hosts(path: Path) -> list[Host]:
    """A line per machine: NAME [slots=N]; # begins a comment."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"hosts is '{path}', which cannot be read: {error}") from None
    found: list[Host] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            found.append(read_host(words, f"line {number} of {path}"))
    if not found:
        raise UsageError(
            f"hosts is '{path}', which names no machine; write one per line: NAME [slots=N]"
        )
    names = [host.name for host in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"hosts names {twice!r} twice; write it once, with slots=N for N workers")
    return found


def read_host(words: Sequence[str], where: str) -> Host:
    name, *rest = words
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{where} names the machine {name!r}; it must be a host name or an address"
        )
    if not rest:
        return Host(name)
    key, _, value = rest[0].partition("=")
    if len(rest) > 1 or key != "slots" or not value.isdecimal() or int(value) < 1:
        raise UsageError(f"{where} is {' '.join(words)!r}; it must be NAME or NAME slots=N")
    return Host(name, int(value))


def same_slots(hosts: Sequence[Host], per_host: int) -> int:
    counts = {host.slots or per_host for host in hosts} or {per_host}
    if len(counts) > 1:
        raise UsageError(
            f"hosts have different slots {sorted(counts)}; under slurm and pbs every machine runs the same number of workers"
        )
    return counts.pop()
