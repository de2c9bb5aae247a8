"""What a job leaves behind: its settings, a row for every finished cell, a picture, and a table on the screen."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from thinwire.adapters import SimulationReport
from thinwire.errors import JobError, UsageError
from thinwire.plan import predict_from_bytes
from thinwire.recipes.job import Job, difference_but_steps
from thinwire.report.build import judge_training, write_report
from thinwire.tools.comparison import results_table
from thinwire.tools.files import write_text
from thinwire.tools.metrics import METRICS_FILE, read_metrics
from thinwire.tools.plots import plot_comparison, steps_by_run
from thinwire.tools.provenance import describe_origin
from thinwire.tools.results import SUMMARY_FILE, Row, group_seeds, read_rows
from thinwire.tools.scores import format_score
from thinwire.tools.settings.sections import to_toml
from thinwire.tools.started import is_worker_already
from thinwire.tools.tables import say

SETTINGS_FILE = "config.toml"


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
    if job.resume and (out / METRICS_FILE).exists():
        # Here and not at the end, when it is to be drawn.
        read_metrics(out / METRICS_FILE)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / SETTINGS_FILE, to_toml(job.to_settings()))
    except OSError as error:
        raise UsageError(f"out is '{out}', which cannot be written to ({error.strerror})") from None


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
    """Draw the curves, write the page and show the table; JobError if the replicas drifted apart."""
    if job.evaluate:
        for row in rows:
            say(console, describe_metrics(row))
        return
    table, page = write_results(job, rows)
    console.print(table)
    for line in [
        *describe_costs(rows),
        *(judge_training(job.out) if len(rows) > 1 else ()),
        *(() if is_timed(job) else project_links(rows, job.running.world)),
        f"files in {job.out}; {page} shows them",
    ]:
        say(console, line)
    check_replicas(rows)


def check_replicas(rows: Sequence[Row]) -> None:
    drifted = [row.run for row in rows if not row.replicas_identical]
    if drifted:
        raise JobError(f"the workers ended with different parameters under {', '.join(drifted)}")


def write_results(job: Job, rows: Sequence[Row]) -> tuple[Table, Path]:
    """Draw the curves and write the page; the table of the rows, and where the page is."""
    records = read_metrics(job.out / METRICS_FILE)
    picture = job.out / ("comparison.png" if len(rows) > 1 else "training.png")
    title = f"{job.choice.label}, {describe_workers(job)}, {rows[0].parameters:,} parameters"
    plot_comparison(picture, records, rows, title, timed=is_timed(job))
    table = results_table(rows, title, job.target, steps_by_run(records))
    return table, write_report(job.out)


def is_timed(job: Job) -> bool:
    """Whether the workers talk over links whose seconds count."""
    return job.running.link is not None or is_worker_already()


def describe_costs(rows: Sequence[Row]) -> list[str]:
    """Memory and speed of simulated workers, in a line; of many runs, see their rows."""
    costs = [row.simulation for row in rows if row.simulation is not None]
    return [f"simulated {SimulationReport(**costs[0])}"] if len(rows) == len(costs) == 1 else []


LINKS = {"1 Gbit/s": 1e9, "10 Gbit/s": 1e10}
HOP_S = 50e-6
"""Latency of one hop of a usual network."""


def project_links(rows: Sequence[Row], world: int) -> list[str]:
    """What a step would take on slower links, a line per method: on one machine's own loopback dense looks best."""
    groups = [[row for row in group if row.ms_per_step is not None] for group in group_seeds(rows)]
    if world < 2 or not any(groups):
        return []
    hops = 2 * (world - 1) * HOP_S
    lines = [
        "projected, not measured: from the bytes that are sent and the time of a step here without them"
    ]
    for group in filter(None, groups):
        own_s = (
            median((row.ms_per_step or 0) - (row.exposed_ms_per_step or 0) for row in group) / 1e3
        )
        sent = fmean(row.wire_bytes_per_step for row in group)
        times = {
            name: 1e3 * predict_from_bytes(own_s, sent, hops, 8 / bits)
            for name, bits in LINKS.items()
        }
        shown = " and ".join(f"{ms:.1f} ms at {name}" for name, ms in times.items())
        density = group[0].asked_density
        method = group[0].method + (f" {100 * density:g} %" if density is not None else "")
        lines.append(f"  a step with {method} would take {shown}")
    return lines


def describe_workers(job: Job) -> str:
    simulated = "" if job.running.simulate_workers is None else "simulated "
    links = "" if job.running.link is None else f" on emulated {job.running.link} links"
    return f"{job.running.world} {simulated}workers{links}"


def describe_metrics(row: Row) -> str:
    listed = ", ".join(f"{name} {format_score(name, value)}" for name, value in row.metrics.items())
    return f"{row.run}: {listed} after step {row.steps}"
