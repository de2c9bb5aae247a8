"""Rows of the compression benchmark: one flat record per measurement, kept in a folder as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.observe.files import write_text

FLOOR = "floor"
THINWIRE = "thinwire"
ANCHOR = "anchor"
OK = "ok"
FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure; it may give several rows."""

    model: str
    tensor: str | None
    """A shape such as "1024x4096" where one tensor is measured by itself."""
    density: float | None
    """None for what has no density."""
    kind: str
    """"floor", "thinwire" or "anchor"."""
    name: str
    """Of the method or anchor."""

    def describe(self) -> str:
        where = self.model if self.tensor is None else f"{self.model} {self.tensor}"
        return f"{where}, {self.name}" + (f" {self.density:g}" if self.density is not None else "")


@dataclass(frozen=True, kw_only=True)
class CompressRow(Case):
    """One measurement; docs/benchmarks.md explains the columns."""

    work: str
    """"copy", "encode", "decode", or "encode and decode" where the two cannot be told apart."""
    status: str
    ms: float | None = None
    ms_p20: float | None = None
    ms_p80: float | None = None
    host_ms: float | None = None
    device_ms: float | None = None
    """As `ms`, but all launches were queued before the device began."""
    floor_ms: float | None = None
    ratio: float | None = None
    """ms / floor_ms"""
    gb_per_s: float | None = None
    payload_bytes: int | None = None
    peak_extra_bytes: int | None = None
    laps: int | None = None
    elements: int
    tensors: int
    world: int | None = None
    buckets: int | None = None
    bucket_mb: float | None = None
    settings: str = ""
    device: str
    note: str = ""
    date: str
    commit: str | None
    hardware: str
    versions: str

    @property
    def case(self) -> Case:
        return Case(**{field.name: getattr(self, field.name) for field in fields(Case)})


NAMES = [field.name for field in fields(CompressRow)]


def case_key(row: CompressRow) -> tuple[Any, ...]:
    """What makes two rows belong to the same measurement; those of another device or bucketing do not."""
    return (row.case, row.device, row.world, row.bucket_mb)


class CompressBook:
    """The rows of one output folder, complete after every case; without a folder they are only kept in memory."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        known = folder is not None and (folder / "rows.json").exists()
        self.rows: list[CompressRow] = read_rows(folder) if known and folder is not None else []

    def find(self, key: tuple[Any, ...]) -> list[CompressRow]:
        """The rows of one measurement."""
        return [row for row in self.rows if case_key(row) == key]

    def add(self, rows: Sequence[CompressRow]) -> None:
        """Keep the rows of one case, in place of earlier ones of the same, and save."""
        keys = {case_key(row) for row in rows}
        self.rows = [*(row for row in self.rows if case_key(row) not in keys), *rows]
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            lines = ",\n".join(json.dumps(asdict(row)) for row in self.rows)
            write_text(self.folder / "rows.json", f"[\n{lines}\n]\n")
            write_text(self.folder / "rows.csv", to_csv(self.rows))


def read_rows(path: Path) -> list[CompressRow]:
    """Rows of an output folder or of a rows.json."""
    file = path / "rows.json" if path.is_dir() else path
    try:
        return [CompressRow(**row) for row in json.loads(file.read_text())]
    except FileNotFoundError:
        raise UsageError(f"there is no {file}; run `thinwire bench compress` first") from None
    except (json.JSONDecodeError, TypeError) as error:
        raise UsageError(f"{file} is not a list of compression rows: {error}") from None


def to_csv(rows: Sequence[CompressRow]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, NAMES, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values = asdict(row)
        writer.writerow({k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()})
    return text.getvalue()
