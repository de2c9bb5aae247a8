"""`thinwire analyse convergence`: xi and the rows that get nothing, epoch by epoch, while a recipe trains."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from thinwire.analyse.convergence import Look, WatchedWorkers
from thinwire.analyse.plots import plot_convergence
from thinwire.errors import UsageError
from thinwire.recipes.command import TaskName
from thinwire.recipes.config import Choice, Running, Training
from thinwire.recipes.device import choose_device
from thinwire.recipes.job import Job, build_job
from thinwire.recipes.loop import count_steps_per_epoch
from thinwire.recipes.report import default_folder, run_folder
from thinwire.recipes.worker import run_cell
from thinwire.tools.files import write_text
from thinwire.tools.methods import build_method, check_methods, keep_taken
from thinwire.tools.metrics import METRICS_FILE, MetricsLog
from thinwire.tools.progress import make_progress
from thinwire.tools.provenance import describe_origin
from thinwire.tools.results import Row
from thinwire.tools.scores import format_score, name_metric
from thinwire.tools.settings.building import check_fields
from thinwire.tools.settings.kinds import Density, NewFolder, Positive
from thinwire.tools.settings.options import DryRun, Said, command, said
from thinwire.tools.settings.sections import to_toml
from thinwire.tools.tables import TIGHT, format_table, make_console, say

METHODS = ("topk", "adtopk")
RESULTS_FILE = "convergence.json"
PICTURE = "convergence.png"


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What is looked at."""

    methods: tuple[str, ...] = METHODS
    """Methods that choose entries, with commas; your own as module:attribute."""
    density: Density = 0.01
    """Fraction of the entries sent."""
    simulate_workers: Positive = 8
    """All of them in this process."""
    no_break_even: bool = False
    """Compress also where dense would send less; below 1024 elements layers stay dense."""
    out: NewFolder | None = None
    """Run folder; runs/... unless given."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_methods(self.methods)
        for name in self.methods:
            method = build_method(name, keep_taken(name, density=self.density))
            if not method.selects or method.takes_over is not None:
                raise UsageError(
                    f"methods names {name!r}, for which there is no xi: it must choose entries, and of gradients "
                    "without momentum, as topk and adtopk do"
                )

    @property
    def densities(self) -> list[float]:
        """None where no method has one to set."""
        return [self.density] if any(keep_taken(n, density=1) for n in self.methods) else []


@dataclass(frozen=True)
class Watched:
    """One run: how it ended, and what was seen in every epoch."""

    row: Row
    looks: list[Look]

    def to_dict(self) -> dict[str, Any]:
        scores = [score for _, score in self.row.tests]
        return {
            "run": self.row.run,
            "asked_density": self.row.asked_density,
            "density": self.row.density,
            "metric": self.row.metric,
            "epochs": [
                {**look.to_dict(), "score": score}
                for look, score in zip(self.looks, scores, strict=True)
            ],
        }


@command
def analyse_convergence(
    name: TaskName = None,
    *,
    task: Said = said(Choice, "data", "model", "data_dir", "synthetic", "tiny"),
    analysis: Analysis,
    training: Said = said(Training, "epochs", "batch_size", "lr", "seed"),
    run: Said = said(Running, "device"),
    dry_run: DryRun = False,
) -> None:
    """Measure the constant xi, and count the rows that get nothing, in every epoch of a training.

    thinwire analyse convergence digits --simulate-workers 8 --density 0.01 --epochs 10

    Trains the task once with each method and writes convergence.json and
    convergence.png to the run folder. What xi is and what a row is:
    docs/simulate.md.
    """
    forced = analysis.no_break_even
    settings = {
        "task": {"name": name, **task},
        "training": training,
        "run": {"simulate_workers": analysis.simulate_workers, **run},
        "method": {"dense_fallback": False} if forced else {},
        "compare": {"methods": list(analysis.methods), "densities": analysis.densities},
    }
    job = build_job("compare", settings, out=analysis.out or Path())
    if dry_run:
        print(to_toml(job.to_settings()), end="")
        return
    if analysis.out is None:
        job = replace(job, out=default_folder("convergence", job.choice.label))
    console = make_console()
    with run_folder(job), make_progress(console) as progress:
        runs = watch_job(job, progress.show, small_dense=forced)
    write_results(job, runs, break_even=not forced)
    console.print(summary_table(runs))
    say(console, f"files in {job.out}")


def write_results(job: Job, runs: Sequence[Watched], *, break_even: bool) -> None:
    """Rows and picture, in the run folder."""
    kept = "".join(f", {density:.3g} kept" for density in job.densities)
    rows = [run.to_dict() for run in runs]
    content = {
        "job": job.to_settings(),
        "break_even": break_even,
        **describe_origin(),
        "runs": rows,
    }
    write_text(job.out / RESULTS_FILE, json.dumps(content, indent=1) + "\n")
    title = f"{job.choice.label}{kept}, {job.running.world} workers"
    plot_convergence(job.out / PICTURE, rows, title)


def watch_job(job: Job, listener: Any, *, small_dense: bool = False) -> list[Watched]:
    """Train every cell of a job and look at it once per epoch; under `small_dense` small layers travel dense."""
    # Training ends here, and so does what the last steps held back: no news for the user.
    logging.getLogger("thinwire.handle").setLevel(logging.ERROR)
    device = choose_device(job.running)
    task = job.choice.find()
    data = task.load(job.source).to(device)
    log = MetricsLog(job.out / METRICS_FILE, [listener])
    runs = []
    for cell in job.cells():
        world = job.running.world
        steps = count_steps_per_epoch(data.train, cell.training, world)
        workers = WatchedWorkers(world, device, steps, small_dense=small_dense)
        row, _ = run_cell(job, cell, task, data, workers, log)
        runs.append(Watched(row, workers.looks))
    log.close()
    return runs


def summary_table(runs: Sequence[Watched]) -> Table:
    """One line per run."""
    columns = {
        "method": "{method}",
        "xi\nfirst epoch": "{first:.3f}",
        "xi\nlargest": "{largest:.3f}",
        "xi\nlast epoch": "{last:.3f}",
        "rows without an entry\nas sent": "{as_sent}",
        "\nall-dimension": "{all_dimension}",
        "\nglobal": "{global}",
        f"test\n{name_metric(runs[0].row.metric)}": "{score}",
    }
    rows = []
    for run in runs:
        xi = [look.xi for look in run.looks]
        empty = {
            kind: mean_share(run.looks, f"empty_{kind}")
            for kind in ("as_sent", "all_dimension", "global")
        }
        score = format_score(run.row.metric, run.row.score)
        row = {"method": run.row.run, "first": xi[0], "largest": max(xi), "last": xi[-1]}
        rows.append({**row, **empty, "score": score})
    return format_table(columns, rows, **TIGHT)


def mean_share(looks: Sequence[Look], name: str) -> str:
    """Of all rows, over all epochs."""
    rows = sum(look.rows for look in looks)
    return f"{sum(getattr(look, name) for look in looks) / rows:.1%}" if rows else "-"
