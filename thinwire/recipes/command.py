"""`thinwire train` and `thinwire compare`: the command line of the recipes. What runs a job is imported when one is run."""

from __future__ import annotations

from typing import Annotated

import typer

from thinwire.recipes.config import (
    Choice,
    Compared,
    RunFolder,
    Running,
    SettingsFiles,
    Sweep,
    Training,
)
from thinwire.recipes.listing import print_list
from thinwire.tools.clusters import ClusterScript
from thinwire.tools.methods import MethodOptions
from thinwire.tools.settings.building import build
from thinwire.tools.settings.options import DryRun, Said, command, said

TaskName = Annotated[
    str | None,
    typer.Argument(
        metavar="TASK",
        help="A name of --list, or your own as module:attribute.",
        show_default=False,
    ),
]


def show_list(wanted: bool) -> None:
    if wanted:
        print_list()
        raise typer.Exit


List = Annotated[
    bool,
    typer.Option(
        "--list",
        metavar="",
        help="Show tasks, data, models, methods, configurations.",
        callback=show_list,
        is_eager=True,
    ),
]

TASK = said(Choice, "data", "model", "data_dir", "download", "synthetic", "tiny")
TRAINING = ("epochs", "batch_size", "lr", "precision", "channels_last")
FOLDER = ("out", "suffix", "resume", "ledger")


@command
def train(
    context: typer.Context,
    name: TaskName = None,
    *,
    task: Said = TASK,
    method: Said = said(MethodOptions),
    training: Said = said(Training, *TRAINING, "seed"),
    run: Said = said(Running),
    settings: SettingsFiles,
    sweep: Sweep,
    run_folder: RunFolder,
    cluster: ClusterScript,
    list_: List = False,
    dry_run: DryRun = False,
) -> None:
    """Train a task once, with compressed gradients.

    thinwire train digits --method adtopk --density 0.01 --workers 4

    On several machines: torchrun --nnodes 2 ... -m thinwire train digits
    """
    from thinwire.recipes.start import Request, start

    flags = {"task": {"name": name, **task}, "method": method, "training": training, "run": run}
    words = context.find_root().obj
    start(Request("train", flags, settings, sweep, run_folder, cluster, words), dry_run)


@command
def compare(
    context: typer.Context,
    name: TaskName = None,
    *,
    task: Said = TASK,
    comparison: Said = said(Compared),
    method: Said = said(MethodOptions, "values", "axis", "rank"),
    training: Said = said(Training, *TRAINING),
    run: Said = said(Running),
    settings: SettingsFiles,
    sweep: Sweep,
    run_folder: Said = said(RunFolder, *FOLDER),
    cluster: ClusterScript,
    list_: List = False,
    dry_run: DryRun = False,
) -> None:
    """Train a task once with each method, from the same seed, and compare.

    thinwire compare digits --workers 4 --methods dense,topk,adtopk --density 0.01

    Shows a table at the end and writes metrics.jsonl, summary.json and
    comparison.png to the run folder. With --resume, what is finished there
    is not done again.
    """
    from thinwire.recipes.start import Request, start

    folder = build(RunFolder, run_folder, where="")
    flags = {
        "task": {"name": name, **task},
        "method": method,
        "training": training,
        "run": run,
        "compare": comparison,
    }
    words = context.find_root().obj
    start(Request("compare", flags, settings, sweep, folder, cluster, words), dry_run)
