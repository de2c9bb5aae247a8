"""Rows of the compression benchmark: one flat record per measurement."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from thinwire.tools.books import Book

FLOOR = "floor"
THINWIRE = "thinwire"
ANCHOR = "anchor"


@dataclass(frozen=True, kw_only=True)
class CompressCase:
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
class CompressRow(CompressCase):
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
    def case(self) -> CompressCase:
        return CompressCase(
            **{field.name: getattr(self, field.name) for field in fields(CompressCase)}
        )


def case_key(row: CompressRow) -> tuple[Any, ...]:
    """What makes two rows belong to the same measurement; those of another device or bucketing do not."""
    return (row.case, row.device, row.world, row.bucket_mb)


class CompressBook(Book[CompressRow]):
    """The rows of one output folder."""

    benchmark = "bench compress"
    columns = tuple(field.name for field in fields(CompressRow))
    digits = 5

    @staticmethod
    def from_plain(values: dict[str, Any]) -> CompressRow:
        return CompressRow(**values)

    @staticmethod
    def to_plain(row: CompressRow) -> dict[str, Any]:
        return asdict(row)

    @staticmethod
    def key(row: CompressRow) -> tuple[Any, ...]:
        return case_key(row)

    def find(self, key: tuple[Any, ...]) -> list[CompressRow]:
        """The rows of one measurement."""
        return [row for row in self.rows if case_key(row) == key]


read_rows = CompressBook.read
