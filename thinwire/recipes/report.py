"""What a job leaves behind: its settings, a row for every finished cell, a picture, and a table on the screen."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from thinwire.adapters.simulate import SimulationReport
from thinwire.errors import JobError, UsageError
from thinwire.observe.files import write_text
from thinwire.observe.metrics import METRICS_FILE, read_metrics
from thinwire.observe.plots import plot_comparison
from thinwire.observe.provenance import describe_origin
from thinwire.observe.results import Row
from thinwire.observe.scores import format_score
from thinwire.observe.tables import results_table
from thinwire.recipes.job import Job, difference_but_steps
from thinwire.recipes.settings import to_toml

SETTINGS_FILE = "config.toml"
SUMMARY_FILE = "summary.json"


def default_folder(kind: str, task: str, suffix: str = "") -> Path:
    """runs/compare-digits-20260131-235959, with the user's suffix, and a number behind it if that is taken."""
    stem = f"{kind}-{task.replace(':', '-')}-{datetime.now():%Y%m%d-%H%M%S}"
    stem += f"-{suffix}" if suffix else ""
    candidates = (Path("runs") / (stem if n == 1 else f"{stem}-{n}") for n in range(1, 1000))
    return next(path for path in candidates if not path.exists())


def make_folder(job: Job) -> None:
    """Create the run folder with the job's settings in it; only a resumed job may find it full."""
    out = job.out
    full = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if full and not job.resume:
        raise UsageError(
            f"out is '{out}', which is there already; name a new or empty folder, or --resume what is in it"
        )
    if job.evaluate:
        return
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / SETTINGS_FILE, to_toml(job.to_settings()))


@contextlib.contextmanager
def run_folder(job: Job) -> Iterator[None]:
    """`make_folder` for as long as the job runs; if it is refused, the folder is again as it was found."""
    settings, metrics = job.out / SETTINGS_FILE, job.out / METRICS_FILE
    before = settings.read_text() if settings.is_file() else None
    there = job.out.exists()
    make_folder(job)
    try:
        yield
    except UsageError:
        if before is not None:
            write_text(settings, before)
        elif not metrics.exists() or metrics.stat().st_size == 0:
            settings.unlink(missing_ok=True)
            metrics.unlink(missing_ok=True)
            if not there:
                # Not empty where somebody else has put something there meanwhile.
                with contextlib.suppress(OSError):
                    job.out.rmdir()
        raise


# -- rows ------------------------------------------------------------------------------------------------------


def read_rows(out: Path) -> list[dict[str, Any]]:
    """Every finished cell: the fields of its row, `about` (all its settings) and `origin` (what it was measured with)."""
    path = out / SUMMARY_FILE
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def find_finished(job: Job) -> dict[str, dict[str, Any]]:
    """The rows of the cells that need not run again, by the cells' labels; settings that changed are refused.

    A row may carry the label of another occasion, when there were fewer seeds or densities to tell apart.
    """
    if not job.resume or job.evaluate:
        return {}
    saved = read_rows(job.out)
    finished = {}
    for cell in job.cells():
        done = next((entry for entry in saved if entry["about"] == cell.about), None)
        if done is not None:
            finished[cell.label] = {
                field.name: done[field.name] for field in fields(Row) if field.name in done
            }
            continue
        namesake = next((entry for entry in saved if entry["run"] == cell.label), None)
        if namesake is not None:
            difference = difference_but_steps(cell.about, namesake["about"])
            if difference is not None:
                raise UsageError(
                    f"{difference} when {cell.label} in '{job.out}' was finished; name another folder"
                )
    return finished


def save_row(job: Job, row: Row, about: Mapping[str, Any]) -> None:
    """Add a finished cell to the summary at once, so that nothing is lost if a later one fails."""
    origin = describe_origin()
    entry = {**row.to_dict(), "about": dict(about), "origin": origin}
    kept = [other for other in read_rows(job.out) if other["run"] != row.run]
    summary = {"job": job.to_settings(), **origin, "rows": [*kept, entry]}
    write_text(job.out / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")


# -- the end ---------------------------------------------------------------------------------------------------


def report(job: Job, rows: Sequence[Row], console: Console) -> None:
    """Draw the curves and show the table; JobError if the replicas drifted apart."""
    if job.evaluate:
        for row in rows:
            console.print(describe_metrics(row), markup=False, highlight=False, soft_wrap=True)
        return
    records = read_metrics(job.out / METRICS_FILE)
    picture = job.out / ("comparison.png" if len(rows) > 1 else "training.png")
    title = f"{job.choice.label}, {describe_workers(job)}, {rows[0].parameters:,} parameters"
    plot_comparison(picture, records, rows, title)
    console.print(results_table(rows, title))
    for line in [*describe_costs(rows), f"files in {job.out}"]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    drifted = [row.run for row in rows if not row.replicas_identical]
    if drifted:
        raise JobError(f"the workers ended with different parameters under {', '.join(drifted)}")


def describe_costs(rows: Sequence[Row]) -> list[str]:
    """Memory and speed of simulated workers, in a line; of many runs, see their rows."""
    costs = [row.simulation for row in rows if row.simulation is not None]
    return [f"simulated {SimulationReport(**costs[0])}"] if len(rows) == len(costs) == 1 else []


def describe_workers(job: Job) -> str:
    simulated = "" if job.running.simulate_workers is None else "simulated "
    return f"{job.running.world} {simulated}workers"


def describe_metrics(row: Row) -> str:
    listed = ", ".join(f"{name} {format_score(name, value)}" for name, value in row.metrics.items())
    return f"{row.run}: {listed} after step {row.steps}"
