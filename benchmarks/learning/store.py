"""Store: the rows of finished cells and the curves of all of them, on disk at any moment.

rows.json    a list: the fields of `thinwire.tools.results.Row`, and task, epochs, steps_per_epoch, train_loss (the mean of the
             last epoch), graph (whether passes were replayed), side_by_side (cells that ran at once), data (what to say of it), about (all settings) and origin (versions, hardware, date, commit)
rows.csv     the same without what does not fit into a line
curves.json  by cell: per epoch its step, score, mean training loss and seconds; `finished` says whether a row belongs to it
summary.txt  the rows as a table with verdicts

Rows of an earlier sitting with other settings or another number of epochs cannot be compared with new ones; they move to
rows-before.json.
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from learning.cells import Cell
from thinwire.tools.files import write_text
from thinwire.tools.scores import format_score

Row = dict[str, Any]
COLUMNS = (
    "task",
    "method",
    "asked_density",
    "seed",
    "epochs",
    "steps",
    "metric",
    "score",
    "density",
    "ratio",
    "dense_bytes_per_step",
    "wire_bytes_per_step",
    "parameters",
    "ms_per_step",
    "seconds",
    "graph",
    "data",
    "settings",
)
SAVE_EVERY_S = 2.0


class Store:
    def __init__(
        self, folder: Path, *, commit: str | None = None, resume: Path | None = None
    ) -> None:
        self._folder = folder
        self._commit = commit
        self.rows: list[Row] = []
        self.curves: dict[str, dict[str, Any]] = {}
        self.warnings: list[str] = []
        self._saved = 0.0
        for path in (resume, folder / "rows.json"):
            if path is not None and path.exists():
                self._take(path)

    def _take(self, path: Path) -> None:
        known = {row["run"] for row in self.rows}
        self.rows += [row for row in read_rows(path) if row["run"] not in known]
        curves = path.with_name("curves.json")
        if curves.exists():
            found = json.loads(curves.read_text())
            self.curves.update({key: curve for key, curve in found.items() if curve["finished"]})

    def has(self, cell: Cell) -> bool:
        return any(is_of(row, cell) for row in self.rows)

    def rows_of(self, cells: Sequence[Cell]) -> list[Row]:
        """Those that were trained as these cells are to be, for however many epochs."""
        by_key = {cell.key: cell for cell in cells}
        return [
            row
            for row in self.rows
            if row["run"] in by_key
            and is_of(row, replace(by_key[row["run"]], epochs=row["epochs"]))
        ]

    def set_aside(self, cells: Sequence[Cell]) -> int:
        """Take out the rows that have a cell's name and are of other settings or epochs; returns how many."""
        by_key = {cell.key: cell for cell in cells}
        kept: list[Row] = []
        others: list[Row] = []
        for row in self.rows:
            cell = by_key.get(row["run"])
            (kept if cell is None or is_of(row, cell) else others).append(row)
        if others:
            path = self._folder / "rows-before.json"
            before = read_rows(path) if path.exists() else []
            write_text(path, json.dumps([*before, *others], indent=1) + "\n")
            self.rows = kept
            for row in others:
                self.curves.pop(row["run"], None)
            self.save()
        return len(others)

    def add_epoch(self, cell: Cell, measured: dict[str, Any]) -> None:
        curve = self.curves.setdefault(cell.key, {"finished": False, "epochs": []})
        if curve["epochs"] and curve["epochs"][-1]["step"] >= measured["step"]:
            curve["epochs"].clear()  # it was begun again
        curve["epochs"].append(measured)
        if time.monotonic() - self._saved > SAVE_EVERY_S:
            self.save()

    def add_row(self, cell: Cell, content: dict[str, Any], note: str, *, side_by_side: int) -> None:
        entry = content["entry"]
        known = {"method": cell.method, "data": note, "side_by_side": side_by_side}
        row = {"task": cell.task, **entry, **known}
        row["origin"]["commit"] = row["origin"]["commit"] or self._commit
        row["note"] = content["reason"]
        self.rows = [other for other in self.rows if other["run"] != cell.key]
        self.rows.append(json.loads(json.dumps(row), parse_constant=lambda _: None))
        if cell.key in self.curves:
            self.curves[cell.key]["finished"] = True
        self.save()

    def save(self) -> None:
        self._saved = time.monotonic()
        write_text(self._folder / "summary.txt", self.summary())
        write_text(self._folder / "rows.json", json.dumps(self.rows, indent=1) + "\n")
        write_text(self._folder / "rows.csv", to_csv(self.rows))
        write_text(self._folder / "curves.json", json.dumps(self.curves) + "\n")

    def summary(self) -> str:
        """What there is to know first, then the table."""
        # Here, because the report reads rows by this module.
        from learning.report import summary_text

        return "".join(f"{line}\n" for line in self.warnings) + summary_text(self.rows)

    def describe(self, cell: Cell) -> str:
        row = next(row for row in self.rows if row["run"] == cell.key)
        score = math.nan if row["score"] is None else row["score"]
        return (
            f"{cell.key}: {row['metric']} {format_score(row['metric'], score)} after {row['epochs']} epochs, "
            f"{row['seconds']:.0f} s, {row['ms_per_step']:.1f} ms per step{'' if row['graph'] else ', no graph'}"
        )


def is_of(row: Row, cell: Cell) -> bool:
    """Whether a row is what training this cell gives."""
    about = row["about"]
    wanted = {key: None if value == "none" else value for key, value in cell.training.items()}
    return (
        (row["run"], row["epochs"], about["workers"]) == (cell.key, cell.epochs, cell.workers)
        and all(about["training"].get(key) == value for key, value in wanted.items())
        and all(about["settings"].get(key) == value for key, value in cell.own.items())
    )


def read_rows(path: Path) -> list[Row]:
    return list(json.loads(path.read_text()))


def to_csv(rows: list[Row]) -> str:
    text = io.StringIO()
    origin = ("date", "commit", "torch", "gpu")
    writer = csv.DictWriter(text, [*COLUMNS, *origin], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        found = row["origin"]
        gpus = found["hardware"]["gpus"]
        extra = {
            "date": found["date"],
            "commit": found["commit"],
            "torch": found["versions"]["torch"],
            "gpu": gpus[0] if gpus else "",
        }
        writer.writerow({**row, **extra})
    return text.getvalue()
