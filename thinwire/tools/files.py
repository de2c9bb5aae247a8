"""Files of rows: written as a whole or not at all."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.files import write_bytes


def write_text(path: Path, text: str) -> None:
    """A file that is either complete or not there."""
    write_bytes(path, text.encode())


def format_csv(
    columns: Sequence[str], rows: Iterable[Mapping[str, Any]], digits: int | None = None
) -> str:
    """Rows with these columns, whatever else they hold; with so many digits after the point, if that is said."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        if digits is not None:
            row = {k: round(v, digits) if isinstance(v, float) else v for k, v in row.items()}
        writer.writerow(row)
    return text.getvalue()
