"""Parts of the campaign: each does one kind of harm many times, and counts what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from thinwire.files import write_bytes

Tally = dict[str, float]
"""What some units came to: `units`, and counts by name. Names that begin with "slowest" or "most" are largest values."""
Run = Callable[[int, int, Path], Iterator[Tally]]
"""From a first unit to before a last one, in a folder of the part's own."""


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    harm: str
    """What is done, for the table."""
    units: int
    """At a scale of 1."""
    run: Run
    zero: tuple[str, ...]
    """Counts that must be 0."""


class Book:
    """What was counted so far, on disk after every unit: a campaign that was stopped goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.tallies: dict[str, Tally] = json.loads(path.read_text()) if path.exists() else {}

    def done(self, part: str) -> int:
        return int(self.tallies.get(part, {}).get("units", 0))

    def add(self, part: str, new: Mapping[str, float]) -> None:
        tally = self.tallies.setdefault(part, {})
        for name, count in new.items():
            before = tally.get(name, 0)
            largest = name.startswith(("slowest", "most"))
            tally[name] = max(before, count) if largest else before + count
        write_bytes(self._path, json.dumps(self.tallies, indent=1).encode())


def failures(part: Part, tally: Mapping[str, float]) -> list[str]:
    return [name for name in part.zero if tally.get(name, 0)]
