"""Books: the rows of a benchmark in one folder, as rows.json and rows.csv. A row that is there is not measured again."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from thinwire.errors import UsageError
from thinwire.tools.files import format_csv, write_text

RowType = TypeVar("RowType")

OK = "ok"
FAILED = "failed"
"""How a measurement ended."""


class Book(ABC, Generic[RowType]):
    """The rows of one folder, complete after every measurement; without a folder they are only kept in memory."""

    benchmark: ClassVar[str]
    """The command that makes such rows."""
    columns: ClassVar[Sequence[str]]
    digits: ClassVar[int | None] = None
    """Behind the point in the CSV file; None for all."""

    def __init__(self, folder: Path | None) -> None:
        if folder is not None and folder.exists() and not folder.is_dir():
            raise UsageError(f"out is '{folder}', which is no folder")
        self.folder = folder
        there = folder is not None and (folder / "rows.json").exists()
        self.rows: list[RowType] = self.read(folder) if there and folder is not None else []

    @staticmethod
    @abstractmethod
    def from_plain(values: dict[str, Any]) -> RowType:
        """A row as it was read."""

    @staticmethod
    @abstractmethod
    def to_plain(row: RowType) -> dict[str, Any]: ...

    @staticmethod
    @abstractmethod
    def key(row: RowType) -> Any:
        """What makes two rows the same measurement."""

    @classmethod
    def read(cls, path: Path) -> list[RowType]:
        """Rows of a folder or of a rows.json."""
        file = path / "rows.json" if path.is_dir() else path
        try:
            return [cls.from_plain(values) for values in json.loads(file.read_text())]
        except FileNotFoundError:
            raise UsageError(f"there is no {file}; run `thinwire {cls.benchmark}` first") from None
        except (json.JSONDecodeError, TypeError) as error:
            raise UsageError(f"{file} is not a JSON list of rows: {error}") from None

    def replace(self, rows: Sequence[RowType]) -> None:
        """Keep rows in place of earlier ones of the same measurement, and save."""
        keys = [self.key(row) for row in rows]
        self.rows = [*(row for row in self.rows if self.key(row) not in keys), *rows]
        self.save()

    def save(self) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        plain = [self.to_plain(row) for row in self.rows]
        lines = ",\n".join(json.dumps(row) for row in plain)
        write_text(self.folder / "rows.json", f"[\n{lines}\n]\n")
        write_text(self.folder / "rows.csv", format_csv(self.columns, plain, self.digits))
