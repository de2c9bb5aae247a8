"""Start: from what was typed to a job, and the job on its way."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn

from rich.console import Console

from thinwire.errors import Interrupted, JobError, UsageError
from thinwire.recipes.assembly import CHECKPOINTS
from thinwire.recipes.config import Choice, RunFolder, Running, SettingsFiles, Sweep
from thinwire.recipes.job import Job, build_job
from thinwire.recipes.launch import launch
from thinwire.recipes.links import settle_link
from thinwire.recipes.report import SETTINGS_FILE, default_folder, report, run_folder
from thinwire.recipes.settings import parse_override, read_settings
from thinwire.recipes.sweep import (
    Combination,
    parse_sweep,
    plan_jobs,
    read_sweep,
    run_sweep,
    with_seeds,
)
from thinwire.recipes.worker import (
    EXIT_FAILED,
    describe_error,
    has_lost_contact,
    leave,
    wait_for_all,
    work,
)
from thinwire.tools.clusters import ClusterScript
from thinwire.tools.progress import make_progress
from thinwire.tools.settings.building import build, drop_nothing
from thinwire.tools.settings.sections import Settings, compose, to_toml
from thinwire.tools.started import is_worker_already, workers_started
from thinwire.tools.tables import make_console, say
from thinwire.tools.trackers import TRACKERS


@dataclass(frozen=True)
class Request:
    """What was typed."""

    command: Literal["train", "compare"]
    flags: Settings
    """The options that are settings, by section; None where nothing was said."""
    files: SettingsFiles
    sweep: Sweep
    folder: RunFolder
    cluster: ClusterScript
    words: Sequence[str]
    """The command line itself."""


def start(request: Request, dry_run: bool) -> None:
    """Resolve the settings, check all that can be checked before a process is started, and run."""
    folder = request.folder
    if (folder.resume or folder.evaluate) and (folder.out is None or not folder.resume):
        raise UsageError(
            "resume and evaluate work on a run folder; use --resume --out FOLDER, with --evaluate to only test"
        )
    settings, seeds = resolve(request), request.sweep.seeds
    if seeds:
        settings = with_seeds(request.command, settings, seeds)
        request = replace(request, command="compare")
    swept = parse_sweep(request.sweep.sweep)
    before = read_sweep(folder.out) if folder.resume and folder.out is not None else None
    if before is not None and not swept:
        command, swept = before
        request = replace(request, command=command)
    if swept:
        start_sweep(request, settings, swept, dry_run)
        return
    job = build_job(
        request.command,
        settings,
        out=folder.out or Path(),
        resume=folder.resume,
        evaluate=folder.evaluate,
        ledger=folder.ledger,
    )
    check_packages(job)
    if dry_run:
        print(to_toml(job.to_settings()), end="")
    elif request.cluster.wanted:
        request.cluster.show(request.words, job.running.processes)
    else:
        if folder.out is None:
            out = default_folder(request.command, job.choice.label, folder.suffix)
            job = replace(job, out=out)
        run(job)


def start_sweep(
    request: Request, settings: Settings, swept: Mapping[str, Sequence[str]], dry_run: bool
) -> None:
    """Check every combination, and run them one after the other."""
    folder = request.folder
    if request.cluster.wanted or is_worker_already():
        raise UsageError("sweep starts the workers of every job itself; leave the launcher out")
    if folder.evaluate or folder.ledger is not None:
        raise UsageError("sweep goes with neither evaluate nor ledger; use them on one of its runs")
    task = build(Choice, settings.get("task", {}), where="task").label
    out = folder.out or default_folder("sweep", task, folder.suffix)
    jobs = plan_jobs(request.command, settings, swept, out)
    for job in jobs.values():
        check_packages(job)
    if dry_run:
        print(f"{len(jobs)} jobs, in {out}:")
        print("\n".join(f"  {one.name}" for one in jobs))
        return
    jobs = settle_links(jobs, console := make_console())
    try:
        run_sweep(jobs, settings, swept, out, resume=folder.resume, console=console)
    except KeyboardInterrupt:
        again = f"thinwire {request.command} --resume --out {shlex.quote(str(out))}"
        raise Interrupted(f"interrupted; {again} does the jobs that are not finished") from None


def settle_links(jobs: Mapping[Combination, Job], console: Console) -> dict[Combination, Job]:
    """The jobs with `auto` decided for each; why there is no link is said once."""
    settled, reasons = {}, set()
    for one, job in jobs.items():
        running, no_link = settle_link(job.running)
        settled[one] = replace(job, running=running)
        reasons |= {no_link} - {""}
    for reason in sorted(reasons):
        say(console, f"the workers talk over the loopback: {reason}")
    return settled


def check_packages(job: Job) -> None:
    for tracker in TRACKERS:
        if getattr(job.running, tracker) and find_spec(tracker) is None:
            raise UsageError(
                f"{tracker} cannot be found; install what is missing with pip install 'thinwire[{tracker}]'"
            )


# -- settings --------------------------------------------------------------------------------------------------


def resolve(request: Request) -> Settings:
    """Later layers win: the resumed run's settings, files, options, --set."""
    flags, out = said(request.flags), request.folder.out
    asked = flags["run"].get("workers")
    if asked is not None and "simulate_workers" in flags["run"]:
        raise UsageError(
            f"workers is {asked} and simulate_workers is {flags['run']['simulate_workers']}; name only one of them"
        )
    layers: list[Settings] = []
    if request.folder.resume and out is not None:
        if (out / SETTINGS_FILE).exists():
            layers.append(read_settings(str(out / SETTINGS_FILE)))
        elif not request.files.config and not {"name", "data", "model"} & flags["task"].keys():
            raise UsageError(
                f"out is '{out}', which holds no run to resume; name the folder of one, or a task to begin"
            )
    for names in request.files.config:
        layers += [read_settings(name) for name in names.split(",") if name]
    layers.append(flags)
    layers += [parse_override(text) for text in request.files.set_]
    settings = compose(layers)
    running = settings["run"] = dict(settings["run"])
    running["workers"] = count_workers(running.get("workers"), asked, running)
    return settings


def said(flags: Settings) -> Settings:
    """The options without what was not given; a task named there replaces data and model of a file, and the reverse."""
    given = {section: drop_nothing(values) for section, values in flags.items()}
    if "name" in given["task"]:
        given["task"] = {"data": None, "model": None, **given["task"]}
    elif "data" in given["task"] or "model" in given["task"]:
        given["task"]["name"] = None
    return given


def count_workers(settled: int | None, asked: int | None, running: Mapping[str, Any]) -> int:
    """As many as were asked for, or as torchrun has started already."""
    world = workers_started([] if asked is None else [asked])
    if world is None:
        return Running().workers if settled is None else settled
    if world != 1 and running.get("simulate_workers") is not None:
        raise UsageError(
            f"simulate_workers is {running['simulate_workers']}, but {world} processes were started (WORLD_SIZE); "
            "simulated workers need one"
        )
    return world


# -- running it ------------------------------------------------------------------------------------------------


def run(job: Job) -> None:
    """Start local workers, or be one if torchrun has started this process as such."""
    running, no_link = settle_link(job.running)
    job = replace(job, running=running)
    if is_worker_already():
        run_as_worker(job)
    console = make_console()
    if no_link:
        say(console, f"the workers talk over the loopback: {no_link}")
    try:
        with run_folder(job), make_progress(console) as progress:
            rows = launch(job, progress.show)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {how_to_go_on(job)}") from None
    report(job, rows, console)


def how_to_go_on(job: Job) -> str:
    """What to type after a run was stopped, in a sentence."""
    command = f"thinwire {job.command} --resume --out {shlex.quote(str(job.out))}"
    if any((job.out / CHECKPOINTS).rglob("step*.pt")):
        return f"{command} goes on from the last checkpoint"
    if job.command == "compare":
        return f"{command} does the runs that are not finished, from their beginning"
    return "there is no checkpoint to go on from (--checkpoint-every N makes them)"


def describe_doors() -> str:
    """What a job of several machines opens, in a sentence."""
    meet = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return (
        f"workers meet at {meet} and talk over ports that their systems choose; whoever can reach these can run code here, so "
        "keep them inside a network that you trust"
    )


def run_as_worker(job: Job) -> NoReturn:
    """This rank's part; rank 0 also shows progress and reports."""
    try:
        if int(os.environ["RANK"]) == 0:
            console = make_console()
            say(console, describe_doors())
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
    except BaseException as error:
        if has_lost_contact(error):
            rank = os.environ["RANK"]
            print(
                f"thinwire: worker {rank} lost the others: {describe_error(error)}", file=sys.stderr
            )
            leave(EXIT_FAILED)
        traceback.print_exc()
        leave(EXIT_FAILED)
    leave(0)
