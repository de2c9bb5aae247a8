"""Runs: the folders that `train`, `compare`, `bench step` and `plan` leave behind, as a report reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.tools.metrics import METRICS_FILE, Record, read_metrics
from thinwire.tools.results import SUMMARY_FILE, Row, read_rows

ROWS_FILE = "rows.json"
PLAN_FILE = "plan.json"
SWEEP_FILE = "sweep.json"
PLAN_PARTS = {
    "settings",
    "sentences",
    "candidates",
    "timelines",
    "units",
    "rates",
    "step_ms",
    "origin",
}
STEP_COLUMNS = {"model", "method", "rate", "workers", "status", "ms"}
"""By them rows of `bench step` are told from those of other benchmarks."""


@dataclass(frozen=True)
class TrainingRun:
    """The folder of `thinwire train` or `thinwire compare`."""

    name: str
    rows: Sequence[Row]
    records: Sequence[Record]
    settings: dict[str, Any]
    origins: Sequence[dict[str, Any]]
    """What each row was measured with."""


@dataclass(frozen=True)
class StepRun:
    """The folder of `thinwire bench step`."""

    name: str
    rows: Sequence[dict[str, Any]]
    traces: Sequence[Path]
    """Of rank 0, one per row."""


@dataclass(frozen=True)
class PlanRun:
    """The folder of `thinwire plan --out`."""

    name: str
    plan: dict[str, Any]


Run = TrainingRun | StepRun | PlanRun


def read_training(folder: Path, name: str) -> TrainingRun:
    entries = read_rows(folder)
    if not entries:
        raise UsageError(f"run is '{folder}', in which nothing is finished yet")
    known = {field.name for field in fields(Row)}
    try:
        rows = [Row(**{k: v for k, v in entry.items() if k in known}) for entry in entries]
        settings = json.loads((folder / SUMMARY_FILE).read_text()).get("job", {})
    except (TypeError, AttributeError):
        raise UsageError(f"{folder / SUMMARY_FILE} has rows that are not whole") from None
    metrics = folder / METRICS_FILE
    records = read_metrics(metrics) if metrics.exists() else []
    return TrainingRun(name, rows, records, settings, [one.get("origin", {}) for one in entries])


def read_steps(folder: Path, name: str, traces: Path | None = None) -> StepRun:
    file = folder / ROWS_FILE
    try:
        rows = json.loads(file.read_text())
        known = all(row.keys() >= STEP_COLUMNS for row in rows)
    except (ValueError, TypeError, AttributeError, RecursionError):
        known = False
    if not known or not rows:
        raise UsageError(f"{file} has no rows of thinwire bench step, which alone have a report")
    return StepRun(name, rows, sorted((traces or folder).rglob("*-rank0.json")))


def read_plan(folder: Path, name: str) -> PlanRun:
    file = folder / PLAN_FILE
    try:
        plan = json.loads(file.read_text())
        whole = plan.keys() >= PLAN_PARTS
    except (ValueError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise UsageError(f"{file} is damaged; run thinwire plan again")
    return PlanRun(name, plan)


def read_run(folder: Path, name: str, traces: Path | None = None) -> Run:
    """Whatever a folder holds; UsageError if that is nothing a report can be made of."""
    if (folder / SUMMARY_FILE).exists():
        return read_training(folder, name)
    if (folder / ROWS_FILE).exists():
        return read_steps(folder, name, traces)
    if (folder / PLAN_FILE).exists():
        return read_plan(folder, name)
    raise UsageError(
        f"run is '{folder}', which has none of {SUMMARY_FILE} (train, compare), {ROWS_FILE} (bench step) and "
        f"{PLAN_FILE} (plan)"
    )


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The folders, and in place of that of a sweep those of its jobs which have something finished."""
    found: list[Path] = []
    for folder in folders:
        file = folder / SWEEP_FILE
        if not file.exists():
            found.append(folder)
            continue
        try:
            jobs = [folder / name for name in json.loads(file.read_text())["jobs"]]
        except (ValueError, LookupError, TypeError):
            raise UsageError(f"{file} is damaged; name the folders of its jobs instead") from None
        done = [job for job in jobs if (job / SUMMARY_FILE).exists()]
        if not done:
            raise UsageError(f"run is '{folder}', in which nothing is finished yet")
        found += done
    return found


def name_runs(folders: Sequence[Path]) -> list[str]:
    """The folders' own names; their whole paths where these are not enough to tell them apart."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) == len(names):
        return names
    return [str(folder) for folder in folders]
