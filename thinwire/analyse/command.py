"""`thinwire analyse convergence`: xi and the rows that get nothing, epoch by epoch, while a recipe trains."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from thinwire.analyse.convergence import Look, WatchedWorkers
from thinwire.analyse.plots import plot_convergence
from thinwire.errors import UsageError
from thinwire.methods.base import SMALL_NUMEL
from thinwire.methods.registry import parse_names
from thinwire.observe.files import write_text
from thinwire.observe.metrics import MetricsLog
from thinwire.observe.progress import make_progress
from thinwire.observe.provenance import describe_origin
from thinwire.observe.results import Row
from thinwire.observe.scores import format_score, name_metric
from thinwire.observe.tables import make_console
from thinwire.recipes.device import choose_device
from thinwire.recipes.examples import Data
from thinwire.recipes.job import Job, build_job
from thinwire.recipes.loop import count_steps_per_epoch
from thinwire.recipes.report import default_folder, run_folder
from thinwire.recipes.settings import to_toml
from thinwire.recipes.worker import METRICS_FILE, run_cell

METHODS = ("topk", "adtopk")
RESULTS_FILE = "convergence.json"
PICTURE = "convergence.png"

TaskName = Annotated[
    str | None,
    typer.Argument(metavar="TASK", help="A name of thinwire train --list, or module:attribute."),
]
DataName = Annotated[
    str | None, typer.Option(help="With --model, instead of TASK.", metavar="NAME")
]
ModelName = Annotated[
    str | None, typer.Option(help="With --data, instead of TASK.", metavar="NAME")
]
Methods = Annotated[str, typer.Option(help="topk, adtopk or both, with a comma.", metavar="NAMES")]
Density = Annotated[float, typer.Option(help="Fraction of the entries sent.", metavar="FRACTION")]
Workers = Annotated[int, typer.Option(help="All of them in this process.", metavar="N")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the data.", metavar="N")]
BatchSize = Annotated[int | None, typer.Option(help="Examples per worker.", metavar="N")]
LearningRate = Annotated[float | None, typer.Option(help="Peak learning rate.", metavar="RATE")]
Seed = Annotated[int | None, typer.Option(help="Of everything random.", metavar="N")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.", metavar="NAME")]
DataDir = Annotated[
    Path | None, typer.Option(help="Where data sets are (THINWIRE_DATA).", metavar="FOLDER")
]
Synthetic = Annotated[bool, typer.Option("--synthetic", help="Random data of the right shape.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="The same code with a two-layer model.")]
Out = Annotated[
    Path | None, typer.Option(help="Run folder; runs/... unless given.", metavar="FOLDER")
]
NoBreakEven = Annotated[
    bool,
    typer.Option(
        "--no-break-even",
        help=f"Compress also where dense would send less; below {SMALL_NUMEL} elements layers stay dense.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show all settings and start nothing.")]


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


def analyse_convergence(
    task: TaskName = None,
    data: DataName = None,
    model: ModelName = None,
    methods: Methods = "topk,adtopk",
    density: Density = 0.01,
    simulate_workers: Workers = 8,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: LearningRate = None,
    seed: Seed = None,
    device: Device = None,
    data_dir: DataDir = None,
    synthetic: Synthetic = False,
    tiny: Tiny = False,
    no_break_even: NoBreakEven = False,
    out: Out = None,
    dry_run: DryRun = False,
) -> None:
    """Measure the constant xi, and count the rows that get nothing, in every epoch of a training.

    thinwire analyse convergence digits --simulate-workers 8 --density 0.01 --epochs 10

    Trains the task once with each method and writes convergence.json and convergence.png to the run folder. What xi is
    and what a row is: docs/simulate.md.
    """
    names = parse_names(methods)
    if not names or not set(names) <= set(METHODS):
        raise UsageError(f"methods is {methods!r}; it must be topk, adtopk or both, with a comma")
    settings = {
        "task": {
            "name": task,
            "data": data,
            "model": model,
            "data_dir": data_dir,
            "synthetic": synthetic,
            "tiny": tiny,
        },
        "training": {"epochs": epochs, "batch_size": batch_size, "lr": lr, "seed": seed},
        "run": {"simulate_workers": simulate_workers, "device": device},
        "method": {"dense_fallback": False} if no_break_even else {},
        "compare": {"methods": names, "densities": [density]},
    }
    folder = out or default_folder("convergence", task or f"{data}-{model}")
    job = build_job("compare", settings, out=folder)
    if dry_run:
        typer.echo(to_toml(job.to_settings()), nl=False)
        return
    console = make_console()
    with run_folder(job), make_progress(console) as progress:
        runs = watch_job(job, progress.show, small_dense=no_break_even)
    write_results(job, runs, break_even=not no_break_even)
    console.print(summary_table(runs))
    console.print(f"files in {folder}", markup=False, highlight=False, soft_wrap=True)


def write_results(job: Job, runs: Sequence[Watched], *, break_even: bool) -> None:
    """Rows and picture, in the run folder."""
    (density,) = job.densities
    rows = [run.to_dict() for run in runs]
    content = {
        "job": job.to_settings(),
        "break_even": break_even,
        **describe_origin(),
        "runs": rows,
    }
    write_text(job.out / RESULTS_FILE, json.dumps(content, indent=1) + "\n")
    title = f"{job.choice.label}, {density:.3g} kept, {job.running.world} workers"
    plot_convergence(job.out / PICTURE, rows, title)


def watch_job(job: Job, listener: Any, *, small_dense: bool = False) -> list[Watched]:
    """Train every cell of a job and look at it once per epoch; under `small_dense` small layers travel dense."""
    # Training ends here, and so does what the last steps held back: no news for the user.
    logging.getLogger("thinwire.handle").setLevel(logging.ERROR)
    device = choose_device(job.running)
    task = job.choice.find()
    loaded = task.load(job.source)
    data = Data(loaded.kind, loaded.train.to(device), loaded.test.to(device))
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
    table = Table(
        "method",
        "xi\nfirst epoch",
        "xi\nlargest",
        "xi\nlast epoch",
        "rows without an entry\nas sent",
        "\nall-dimension",
        "\nglobal",
        f"test\n{name_metric(runs[0].row.metric)}",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for run in runs:
        xi = [look.xi for look in run.looks]
        table.add_row(
            run.row.run,
            *(f"{value:.3f}" for value in (xi[0], max(xi), xi[-1])),
            *(
                mean_share(run.looks, f"empty_{kind}")
                for kind in ("as_sent", "all_dimension", "global")
            ),
            format_score(run.row.metric, run.row.score),
        )
    return table


def mean_share(looks: Sequence[Look], name: str) -> str:
    """Of all rows, over all epochs."""
    rows = sum(look.rows for look in looks)
    return f"{sum(getattr(look, name) for look in looks) / rows:.1%}" if rows else "-"
