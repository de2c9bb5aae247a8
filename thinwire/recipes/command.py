"""`thinwire train` and `thinwire compare`: the command line of the recipes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from thinwire.errors import JobError, UsageError
from thinwire.methods.registry import METHODS, parse_names
from thinwire.observe.ledger import check_ledger_path
from thinwire.observe.progress import make_progress
from thinwire.observe.tables import make_console
from thinwire.recipes.clusters import check_alone, show_script
from thinwire.recipes.job import Job, build_job
from thinwire.recipes.launch import launch
from thinwire.recipes.listing import print_list
from thinwire.recipes.options import Given, takes_shared_options
from thinwire.recipes.report import SETTINGS_FILE, default_folder, report, run_folder
from thinwire.recipes.settings import Settings, compose, parse_override, read_settings, to_toml
from thinwire.recipes.started import is_worker_already, workers_started
from thinwire.recipes.worker import EXIT_FAILED, leave, wait_for_all, work

KNOWN = ", ".join(METHODS)
DEFAULT_WORKERS = 4

TaskName = Annotated[
    str | None,
    typer.Argument(metavar="TASK", help="A name of --list, or your own as module:attribute."),
]


@takes_shared_options
def train(
    context: typer.Context,
    given: Given,
    task: TaskName = None,
    method: Annotated[str | None, typer.Option(help=f"One of {KNOWN}.", metavar="NAME")] = None,
    density: Annotated[
        float | None,
        typer.Option(help="Fraction of the entries sent; 0.01 is 1 %.", metavar="FRACTION"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random.", metavar="N")] = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Only test what --resume finds.")
    ] = False,
) -> None:
    """Train a task once, with compressed gradients.

    thinwire train digits --method adtopk --density 0.01 --workers 4

    On several machines: torchrun --nnodes 2 ... -m thinwire train digits
    """
    flags = {
        "task": {"name": task},
        "method": {"name": method, "density": density},
        "training": {"seed": seed},
    }
    start("train", context, given, flags, evaluate=evaluate)


@takes_shared_options
def compare(
    context: typer.Context,
    given: Given,
    task: TaskName = None,
    methods: Annotated[
        str | None, typer.Option(help=f"Some of {KNOWN}, with commas, or all.", metavar="NAMES")
    ] = None,
    density: Annotated[
        str | None,
        typer.Option(help="Fractions of the entries sent, with commas.", metavar="FRACTIONS"),
    ] = None,
    seed: Annotated[
        str | None, typer.Option(help="With commas; each for every method.", metavar="NUMBERS")
    ] = None,
) -> None:
    """Train a task once with each method, from the same seed, and compare.

    thinwire compare digits --workers 4 --methods dense,topk,adtopk --density 0.01

    Shows a table at the end and writes metrics.jsonl, summary.json and comparison.png to the run folder. With --resume,
    what is finished there is not done again.
    """
    compared = {
        "methods": None if methods is None else parse_names(methods),
        "densities": parse_numbers("density", density, float),
        "seeds": parse_numbers("seed", seed, int),
    }
    start("compare", context, given, {"task": {"name": task}, "compare": compared})


# -- from options to a job -------------------------------------------------------------------------------------


def start(
    command: Literal["train", "compare"],
    context: typer.Context,
    given: Given,
    flags: Settings,
    evaluate: bool = False,
) -> None:
    """Resolve the settings, check all that can be checked before a process is started, and run."""
    if given["list_"]:
        print_list(make_console())
        return
    out: Path | None = given["out"]
    if (given["resume"] or evaluate) and (out is None or not given["resume"]):
        raise UsageError(
            "resume and evaluate work on a run folder; use --resume --out FOLDER, with --evaluate to only test"
        )
    check_options(given)
    job = build_job(
        command,
        resolve(given, compose([shared_flags(given), flags]), out),
        out=out or Path(),
        resume=given["resume"],
        evaluate=evaluate,
        ledger=given["ledger"],
    )
    check_packages(job)
    if given["dry_run"]:
        typer.echo(to_toml(job.to_settings()), nl=False)
        return
    if given["print_launch"] is not None:
        typed, workers = context.find_root().obj, job.running.processes
        show_script(given["print_launch"], typed, given["hosts"], given["interface"], workers)
        return
    if out is None:
        job = replace(job, out=default_folder(command, job.choice.label, given["suffix"]))
    run(job)


def check_options(given: Given) -> None:
    """What can be judged without the settings of files."""
    if given["ledger"] is not None:
        check_ledger_path(given["ledger"])
    if given["print_launch"] is None:
        check_alone(given["hosts"], given["interface"])
    if given["workers"] is not None and given["simulate_workers"] is not None:
        raise UsageError(
            f"workers is {given['workers']} and simulate_workers is {given['simulate_workers']}; name only one of them"
        )


def shared_flags(given: Given) -> Settings:
    """The options that both commands share, as settings; None where nothing was said."""

    def pick(*names: str) -> dict[str, Any]:
        return {name: None if given[name] is False else given[name] for name in names}

    return {
        "task": pick("data", "model", "data_dir", "download", "synthetic", "tiny"),
        "method": {**pick("values", "rank"), "axis": parse_axis(given["axis"])},
        "training": {
            **pick("epochs", "batch_size", "lr", "precision"),
            # Here False is said, too.
            "channels_last": given["channels_last"],
        },
        "run": pick(
            "workers",
            "simulate_workers",
            "graph",
            "device",
            "steps",
            "checkpoint_every",
            "deterministic",
            "tensorboard",
        ),
    }


def resolve(given: Given, flags: Settings, out: Path | None) -> Settings:
    """Later layers win: the resumed run's settings, files, options, --set."""
    layers: list[Settings] = []
    if given["resume"] and out is not None:
        if (out / SETTINGS_FILE).exists():
            layers.append(read_settings(str(out / SETTINGS_FILE)))
        elif not given["config"] and not {"name", "data", "model"} & said(flags)["task"].keys():
            raise UsageError(
                f"out is '{out}', which holds no run to resume; name the folder of one, or a task to begin"
            )
    for names in given["config"] or ():
        layers += [read_settings(name) for name in names.split(",") if name]
    layers.append(said(flags))
    layers += [parse_override(text) for text in given["set_"] or ()]
    settings = compose(layers)
    running = settings["run"] = dict(settings["run"])
    running["workers"] = count_workers(running.get("workers"), given["workers"], running)
    return settings


def said(flags: Settings) -> Settings:
    """The options without what was not given; a task named there replaces data and model of a file, and the reverse."""
    given = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in flags.items()
    }
    if "name" in given["task"]:
        given["task"] = {"data": None, "model": None, **given["task"]}
    elif "data" in given["task"] or "model" in given["task"]:
        given["task"]["name"] = None
    return given


def count_workers(settled: int | None, asked: int | None, running: Mapping[str, Any]) -> int:
    """As many as were asked for, or as torchrun has started already."""
    world = workers_started([] if asked is None else [asked])
    if world is None:
        return DEFAULT_WORKERS if settled is None else settled
    if world != 1 and running.get("simulate_workers") is not None:
        raise UsageError(
            f"simulate_workers is {running['simulate_workers']}, but {world} processes were started (WORLD_SIZE); "
            "simulated workers need one"
        )
    return world


def check_packages(job: Job) -> None:
    if job.running.tensorboard and find_spec("tensorboard") is None:
        raise UsageError(
            "tensorboard cannot be found; install what is missing with pip install 'thinwire[tensorboard]'"
        )


def parse_axis(text: str | None) -> int | str | None:
    """A number if it is one; what else is allowed the method says."""
    try:
        return None if text is None else int(text)
    except ValueError:
        return text


def parse_numbers(name: str, text: str | None, kind: Callable[[str], Any]) -> list[Any] | None:
    if text is None:
        return None
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{name} is {text!r}; it must be numbers with commas between") from None


# -- running it ------------------------------------------------------------------------------------------------


def run(job: Job) -> None:
    """Start local workers, or be one if torchrun has started this process as such."""
    if is_worker_already():
        run_as_worker(job)
    console = make_console()
    with run_folder(job), make_progress(console) as progress:
        rows = launch(job, progress.show)
    report(job, rows, console)


def run_as_worker(job: Job) -> NoReturn:
    """This rank's part; rank 0 also shows progress and reports."""
    try:
        if int(os.environ["RANK"]) == 0:
            console = make_console()
            with run_folder(job), make_progress(console) as progress:
                rows = work(job, progress.show)
            wait_for_all()
            report(job, rows, console)
        else:
            work(job)
            wait_for_all()
    except (UsageError, JobError) as error:
        print(f"thinwire: {error}", file=sys.stderr)
        leave(EXIT_FAILED)
    except BaseException:
        traceback.print_exc()
        leave(EXIT_FAILED)
    leave(0)
