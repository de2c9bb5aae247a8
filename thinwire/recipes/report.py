"""What a finished job leaves behind: summary.json, a picture, and a table on the screen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console

from thinwire.errors import JobError, UsageError
from thinwire.observe.files import write_text
from thinwire.observe.metrics import read_metrics
from thinwire.observe.plots import plot_comparison
from thinwire.observe.provenance import describe_origin
from thinwire.observe.results import Row
from thinwire.observe.tables import results_table
from thinwire.recipes.config import Job
from thinwire.recipes.worker import METRICS_FILE


def default_folder(kind: str, task: str) -> Path:
    """runs/compare-digits-20260131-235959, with a number behind it if that is taken."""
    stem = f"{kind}-{task.replace(':', '-')}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (Path("runs") / (stem if n == 1 else f"{stem}-{n}") for n in range(1, 1000))
    return next(path for path in candidates if not path.exists())


def make_folder(out: Path) -> None:
    """Create the run folder; one that holds something already is not overwritten."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"out is '{out}', which is there already; name a new or empty folder")
    out.mkdir(parents=True, exist_ok=True)


def report(job: Job, rows: Sequence[Row], console: Console) -> None:
    """Write the run's files and show its table; JobError if the replicas drifted apart."""
    summary = {"job": job.to_dict(), **describe_origin(), "rows": [row.to_dict() for row in rows]}
    write_text(job.out / "summary.json", json.dumps(summary, indent=2) + "\n")
    picture = job.out / ("comparison.png" if len(rows) > 1 else "training.png")
    title = f"{job.task}, {job.workers} workers, {rows[0].parameters:,} parameters"
    plot_comparison(picture, read_metrics(job.out / METRICS_FILE), rows, title)
    console.print(results_table(rows, title))
    console.print(f"files in {job.out}", markup=False, highlight=False, soft_wrap=True)
    drifted = [row.method for row in rows if not row.replicas_identical]
    if drifted:
        raise JobError(f"the workers ended with different parameters under {', '.join(drifted)}")
