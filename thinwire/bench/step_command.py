"""`thinwire bench step`: the command line of the step benchmark."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from thinwire.bench.anchors import ANCHORS, GLOO_ANCHORS, HSDP_ANCHORS
from thinwire.bench.host_profile import profile_file, read_profile
from thinwire.bench.model_shapes import know_models
from thinwire.bench.models import MODELS  # noqa: F401 (shown in a field's text)
from thinwire.bench.plots import draw_plots
from thinwire.bench.rows import RowBook
from thinwire.bench.step import TIMEOUT_S, run_cells
from thinwire.bench.step_cell import CLUSTER, LOCAL, StepCell, plan_grid
from thinwire.bench.step_cluster import ClusterPlace
from thinwire.bench.step_places import LabPlace, LocalPlace, Place, why_no_lab
from thinwire.bench.step_progress import StepProgress
from thinwire.bench.step_report import show_profile, show_rows
from thinwire.bench.step_suite import NETWORKS, find_suite
from thinwire.errors import UsageError
from thinwire.lab.mps import CONTROL
from thinwire.lab.rates import parse_rate
from thinwire.report.build import write_report
from thinwire.tools.clusters import ClusterScript
from thinwire.tools.settings.building import check_fields
from thinwire.tools.settings.kinds import NewFolder, PositiveNumber, check_ranks
from thinwire.tools.settings.options import DryRun, Said, command, said
from thinwire.tools.signals import signals_as_exceptions
from thinwire.tools.started import is_worker_already, workers_started
from thinwire.tools.tables import make_console, show_plan

DEFAULT_WORKERS = (4,)
SUITE_TAKES = ("device", "amp", "latency", "steps", "seconds")
"""What a suite does not decide itself."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What is measured: every combination of these."""

    model: tuple[str, ...] = ()
    """One or more of {MODELS}, or your own as module:function. (default small)"""
    methods: tuple[str, ...] = ("dense", "topk", "adtopk")
    """Names of methods and anchors, with commas; your own as module:attribute."""
    anchors: bool = True
    """Measure {ANCHORS} as well; the first two send nothing, the last one needs a GPU."""
    rates: tuple[str, ...] | None = None
    """Link rates, with commas: 10gbit,1gbit. Needs root."""
    latency: Annotated[str | None, "TIME"] = None
    """Delay added one way between hosts, such as 50ms; needs rates."""
    every: tuple[int, ...] = (8, 32)
    """Inner steps between two rounds of diloco, streaming-diloco and sparseloco, with commas."""
    workers: tuple[int, ...] | None = None
    """Numbers of workers, with commas; 4 unless a launcher decides."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda where there is a GPU."""
    suite: str | None = None
    """Run a paper's matrix instead: acpsgd."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What is written, and what becomes of rows that are there."""

    out: NewFolder = Path("runs/bench-step")
    """Folder of rows.json, rows.csv, report.html and the plots."""
    trace: NewFolder | None = None
    """Write a Perfetto file per rank and row there."""
    profile: bool = False
    """Print where the host spends a step, phase by phase."""
    plots: bool = True
    """Draw the rows of the folder."""
    timeout: PositiveNumber = TIMEOUT_S
    """End a row's processes after this many seconds."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def profiles(self) -> Path | None:
        return self.out / "profiles" if self.profile else None


@command
def bench_step(
    context: typer.Context,
    *,
    measured: StepPlan,
    step: Said = said(
        StepCell, "amp", "parallel", "batch", "length", "density", "rank", "bucket_mb"
    ),
    timing: Said = said(StepCell, "steps", "seconds"),
    output: StepOutput,
    cluster: ClusterScript,
    dry_run: DryRun = False,
) -> None:
    """Measure a training step: model x method x link rate x workers.

    thinwire bench step --model bert-large --methods topk,adtopk --rates 10gbit,1gbit --workers 4

    Rows of one setup share their processes, and each is saved at once;
    rows that are in the folder already are skipped, unless they failed or
    their model has changed. With rates the workers are the hosts of an emulated
    cluster (needs root). Started by torchrun or a script of --print-launch,
    it measures on the machines it was started on.
    """
    device, counts = find_device(measured.device), count_workers(measured.workers)
    if cluster.wanted and len(counts) > 1:
        listed = ",".join(map(str, counts))
        raise UsageError(f"workers is {listed}; a launch script starts one number of them")
    launched = is_worker_already()
    rates = find_rates(measured, on_cluster=cluster.wanted or launched)
    settings = {**step, **timing, "device": device, "latency": measured.latency}
    cells = plan_cells(measured, rates, counts, settings)
    if cluster.wanted:
        cluster.show(context.find_root().obj, counts[0])
        return
    book = RowBook(output.out)
    cells = know_models(cells, book.rows, lambda line: typer.echo(line, err=True))
    if dry_run:
        if not launched or os.environ["RANK"] == "0":
            new = [cell.describe() for cell in cells if not book.has(cell)]
            show_plan(new, f"{device}, beside what is in {output.out} already")
        return
    console = make_console()
    with signals_as_exceptions(), choose_place(rates, device) as place:
        if isinstance(place, ClusterPlace) and place.rank:
            place.follow()
            return
        with StepProgress(console) as progress:
            run_cells(
                cells,
                book,
                place,
                timeout_s=output.timeout,
                traces=output.trace,
                profiles=output.profiles,
                say=progress.say,
                count=progress.count,
            )
    show_rows(book.rows, console)
    if output.profiles is not None:
        for file in (profile_file(output.profiles, cell) for cell in cells):
            if file.exists():
                show_profile(read_profile(file), console)
    show_files(book, output)


def find_rates(measured: StepPlan, *, on_cluster: bool) -> list[str]:
    """The links to measure on."""
    find = cluster_rates if on_cluster else possible_rates
    rates = find(measured.rates, measured.suite)
    if measured.latency is not None and rates in ([], [CLUSTER]):
        raise UsageError(
            f"latency is {measured.latency}, which only emulated links have; add --rates, as root"
        )
    return rates


def plan_cells(
    measured: StepPlan, rates: list[str], workers: list[int], settings: dict[str, Any]
) -> list[StepCell]:
    """The combinations, or the cells of a suite; it has settings of its own for the step."""
    if measured.suite is None:
        anchors = ANCHORS if settings["device"] == "cuda" else GLOO_ANCHORS
        if settings.get("parallel") == "hsdp":
            anchors = HSDP_ANCHORS
        return plan_grid(
            models=measured.model or ["small"],
            methods=[*(anchors if measured.anchors else ()), *measured.methods],
            rates=rates,
            workers=workers,
            every=measured.every,
            **settings,
        )
    plan = find_suite(measured.suite)
    kept = {name: settings[name] for name in SUITE_TAKES if name in settings}
    model = measured.model[0] if measured.model else None
    cells = plan(model=model, rates=rates or [LOCAL], workers=max(workers), **kept)
    if rates == [CLUSTER]:
        # A launcher has started so many and no fewer.
        return [cell for cell in cells if cell.workers == max(workers)]
    return cells


def show_files(book: RowBook, output: StepOutput) -> None:
    """Draw the rows, write the page, and say where everything is."""
    out = output.out
    typer.echo(f"rows: {out / 'rows.json'}, {out / 'rows.csv'}")
    if output.plots and find_spec("matplotlib") is not None:
        for path in draw_plots(book.rows, out):
            typer.echo(f"plot: {path}")
    typer.echo(f"page: {write_report(out, output.trace)}")


def choose_place(rates: list[str], device: str) -> Place:
    """Where the cells run; rates are asked for only where they can be had."""
    if not rates:
        return LocalPlace()
    if rates == [CLUSTER]:
        return ClusterPlace()
    return LabPlace(mps=device == "cuda" and shutil.which(CONTROL) is not None)


def count_workers(asked: Sequence[int] | None) -> list[int]:
    """The numbers of workers: those asked for, or as many as a launcher has started."""
    counts = list(DEFAULT_WORKERS if asked is None else asked)
    if not counts:
        raise UsageError("workers is empty; it must be whole numbers, with commas")
    for count in counts:
        check_ranks("workers", count)
    world = workers_started([] if asked is None else counts)
    return counts if world is None else [world]


def cluster_rates(asked: Sequence[str] | None, suite: str | None = None) -> list[str]:
    """On machines that are there already the network is what it is."""
    if asked is not None:
        raise UsageError(
            f"rates is {','.join(asked)!r}, but a launcher's machines have a network of their own; leave --rates out"
        )
    return [CLUSTER]


def possible_rates(asked: Sequence[str] | None, suite: str | None) -> list[str]:
    """The rates asked for, or a suite's own; none if they cannot be had here, with a sentence that says why."""
    rates = list(asked or ())
    for rate in rates:
        parse_rate(rate)
    reason = why_no_lab()
    if suite is not None and asked is None and reason is None:
        return list(NETWORKS)
    if not rates or reason is None:
        return rates
    typer.echo(reason, err=True)
    return []


def find_device(name: str) -> str:
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
