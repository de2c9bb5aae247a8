"""`thinwire train` and `thinwire compare`: the command line of the recipes."""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer

from thinwire.errors import JobError, UsageError
from thinwire.methods.registry import METHODS, MethodOptions, build_methods, parse_names
from thinwire.observe.ledger import check_ledger_path
from thinwire.observe.progress import make_progress
from thinwire.observe.tables import make_console
from thinwire.recipes.config import Job
from thinwire.recipes.launch import is_worker_already, launch
from thinwire.recipes.report import default_folder, make_folder, report
from thinwire.recipes.tasks import TASKS, find_task
from thinwire.recipes.worker import EXIT_FAILED, leave, work
from thinwire.select.rows import Axis

DEFAULT_WORKERS = 4
KNOWN = ", ".join(METHODS)

TaskName = Annotated[
    str, typer.Argument(metavar="TASK", help=f"{', '.join(TASKS)}, or your own: module:attribute.")
]
Density = Annotated[
    float | None,
    typer.Option(help="Fraction of the entries sent; 0.01 is 1 %.", metavar="FRACTION"),
]
Workers = Annotated[
    int | None,
    typer.Option(
        help=f"Processes on this machine ({DEFAULT_WORKERS}); under torchrun its own count.",
        metavar="N",
    ),
]
Epochs = Annotated[int | None, typer.Option(help="Passes over the data.", metavar="N")]
BatchSize = Annotated[int | None, typer.Option(help="Examples per worker.", metavar="N")]
LearningRate = Annotated[float | None, typer.Option(help="Peak learning rate.", metavar="RATE")]
Seed = Annotated[int | None, typer.Option(help="The same for every method.", metavar="N")]
Values = Annotated[
    str | None, typer.Option(help="Value code on the wire, such as bf16.", metavar="CODE")
]
AxisName = Annotated[
    str | None,
    typer.Option("--axis", help="Of adtopk: auto, published or a number.", metavar="AXIS"),
]
Rank = Annotated[int | None, typer.Option(help="Rank of powersgd and acpsgd.", metavar="N")]
Out = Annotated[
    Path | None, typer.Option(help="Run folder; runs/... unless given.", metavar="FOLDER")
]

LedgerFile = Annotated[
    Path | None,
    typer.Option(
        "--ledger",
        help="Traffic per worker, method and phase, as CSV.",
        metavar="FILE",
    ),
]


def train(
    task: TaskName,
    method: Annotated[str, typer.Option(help=f"One of {KNOWN}.", metavar="NAME")] = "adtopk",
    density: Density = None,
    workers: Workers = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: LearningRate = None,
    seed: Seed = None,
    values: Values = None,
    axis: AxisName = None,
    rank: Rank = None,
    out: Out = None,
    ledger: LedgerFile = None,
) -> None:
    """Train a task once, with compressed gradients.

    thinwire train digits --method adtopk --density 0.01 --workers 4

    On several machines: torchrun --nnodes 2 ... -m thinwire train digits
    """
    options = MethodOptions(density=density, values=values, axis=parse_axis(axis), rank=rank)
    changes = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "seed": seed}
    run(make_job("train", task, [method], options, workers, changes, out, ledger))


def compare(
    task: TaskName,
    methods: Annotated[
        str, typer.Option(help=f"Some of {KNOWN}, with commas, or all.", metavar="NAMES")
    ] = "dense,topk,adtopk",
    density: Density = None,
    workers: Workers = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: LearningRate = None,
    seed: Seed = None,
    values: Values = None,
    axis: AxisName = None,
    rank: Rank = None,
    out: Out = None,
    ledger: LedgerFile = None,
) -> None:
    """Train a task once with each method, from the same seed, and compare.

    thinwire compare digits --workers 4 --methods dense,topk,adtopk --density 0.01

    Shows a table at the end and writes metrics.jsonl, summary.json and comparison.png to the run folder.
    """
    options = MethodOptions(density=density, values=values, axis=parse_axis(axis), rank=rank)
    changes = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "seed": seed}
    run(make_job("compare", task, parse_names(methods), options, workers, changes, out, ledger))


def make_job(
    kind: str,
    task_name: str,
    methods: list[str],
    options: MethodOptions,
    workers: int | None,
    changes: dict[str, Any],
    out: Path | None,
    ledger: Path | None = None,
) -> Job:
    """Check everything that can be checked before a process is started."""
    build_methods(methods, options)
    if ledger is not None:
        check_ledger_path(ledger)
    given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    return Job(
        task=task_name,
        methods=tuple(methods),
        training=dataclasses.replace(find_task(task_name).training, **given),
        workers=count_workers(workers),
        out=out or default_folder(kind, task_name),
        options=options,
        ledger=ledger,
    )


def count_workers(asked: int | None) -> int:
    if not is_worker_already():
        return DEFAULT_WORKERS if asked is None else asked
    world = int(os.environ["WORLD_SIZE"])
    if asked is not None and asked != world:
        raise UsageError(
            f"workers is {asked}, but {world} were started already (WORLD_SIZE); leave --workers out"
        )
    return world


def parse_axis(text: str | None) -> Axis | None:
    """A number if it is one; what else is allowed the method says."""
    try:
        return None if text is None else int(text)
    except ValueError:
        return cast(Axis, text)


def run(job: Job) -> None:
    """Start local workers, or be one if torchrun has started this process as such."""
    if is_worker_already():
        run_as_worker(job)
    console = make_console()
    make_folder(job.out)
    with make_progress(console) as progress:
        rows = launch(job, progress.show)
    report(job, rows, console)


def run_as_worker(job: Job) -> NoReturn:
    """This rank's part; rank 0 also shows progress and reports."""
    import torch.distributed as dist

    try:
        if int(os.environ["RANK"]) == 0:
            console = make_console()
            make_folder(job.out)
            with make_progress(console) as progress:
                rows = work(job, progress.show)
            dist.barrier()
            report(job, rows, console)
        else:
            work(job)
            dist.barrier()
    except (UsageError, JobError) as error:
        print(f"thinwire: {error}", file=sys.stderr)
        leave(EXIT_FAILED)
    except BaseException:
        traceback.print_exc()
        leave(EXIT_FAILED)
    leave(0)
