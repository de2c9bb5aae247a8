"""`thinwire bench step`: the command line of the step benchmark."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from thinwire.bench.anchors import ANCHORS
from thinwire.bench.dry_run import DryRun, show_plan
from thinwire.bench.models import MODELS
from thinwire.bench.plots import draw_plots
from thinwire.bench.rows import RowBook
from thinwire.bench.step import TIMEOUT_S, run_cells
from thinwire.bench.step_cell import CLUSTER, LOCAL, StepCell, plan_grid
from thinwire.bench.step_cluster import ClusterPlace
from thinwire.bench.step_places import LabPlace, LocalPlace, Place, why_no_lab
from thinwire.bench.step_report import step_table
from thinwire.bench.step_suite import NETWORKS, find_suite, missing_methods
from thinwire.errors import UsageError
from thinwire.lab.mps import CONTROL
from thinwire.lab.rates import parse_rate
from thinwire.lab.signals import signals_as_exceptions
from thinwire.observe.tables import make_console
from thinwire.recipes.clusters import HostsFile, Interface, PrintLaunch, check_alone, show_script
from thinwire.recipes.started import is_worker_already, workers_started
from thinwire.validate import check_choice

DEFAULT_WORKERS = "4"

_Model = Annotated[
    str | None,
    typer.Option(help=f"One or more of {', '.join(MODELS)}, or your own as module:function."),
]
_Methods = Annotated[str, typer.Option(help="Names of methods and anchors, with commas.")]
_Rates = Annotated[
    str | None, typer.Option(help="Link rates, with commas: 10gbit,1gbit. Needs root.")
]
_Workers = Annotated[
    str | None, typer.Option(help="Numbers of workers, with commas; 4 unless a launcher decides.")
]
_Anchors = Annotated[
    bool, typer.Option("--anchors/--no-anchors", help=f"Measure {', '.join(ANCHORS)} as well.")
]
_Device = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
_Amp = Annotated[str, typer.Option(help="none, or bf16 for autocast.")]
_Batch = Annotated[int | None, typer.Option(help="Samples per worker and step.")]
_Length = Annotated[int | None, typer.Option(help="Tokens per sample.")]
_Density = Annotated[float | None, typer.Option(help="Fraction kept by sparse methods.")]
_Rank = Annotated[int | None, typer.Option(help="Rank of low-rank methods.")]
_BucketMb = Annotated[
    float | None, typer.Option(help="DDP's bucket size; 0 is one bucket per tensor.")
]
_Steps = Annotated[int, typer.Option(help="Timed steps per row.")]
_Seconds = Annotated[
    float, typer.Option(help="Fewer steps where they would take longer than this.")
]
_Timeout = Annotated[float, typer.Option(help="End a row's processes after this many seconds.")]
_Out = Annotated[Path, typer.Option(help="Folder of rows.json, rows.csv and the plots.")]
_Trace = Annotated[
    Path | None, typer.Option(help="Write a Perfetto file per rank and row to this folder.")
]
_Suite = Annotated[str | None, typer.Option(help="Run a paper's matrix instead: acpsgd.")]
_Retry = Annotated[bool, typer.Option("--retry-failed", help="Measure failed rows again.")]
_Plots = Annotated[bool, typer.Option("--plots/--no-plots", help="Draw the rows of the folder.")]


def bench_step(
    context: typer.Context,
    model: _Model = None,
    methods: _Methods = "dense,topk,adtopk",
    rates: _Rates = None,
    workers: _Workers = None,
    anchors: _Anchors = True,
    device: _Device = "auto",
    amp: _Amp = "none",
    batch: _Batch = None,
    length: _Length = None,
    density: _Density = None,
    rank: _Rank = None,
    bucket_mb: _BucketMb = None,
    steps: _Steps = 20,
    seconds: _Seconds = 5.0,
    timeout: _Timeout = TIMEOUT_S,
    out: _Out = Path("runs/bench-step"),
    trace: _Trace = None,
    suite: _Suite = None,
    retry_failed: _Retry = False,
    plots: _Plots = True,
    print_launch: PrintLaunch = None,
    hosts: HostsFile = None,
    interface: Interface = None,
    dry_run: DryRun = False,
) -> None:
    """Measure a training step: model x method x link rate x workers.

    thinwire bench step --model bert-large --methods topk,adtopk --rates 10gbit,1gbit --workers 4

    Every row is measured in fresh processes and saved at once; rows that
    are in the folder already are skipped. With rates the workers are the
    hosts of an emulated cluster (needs root). Started by torchrun or a
    script of --print-launch, it measures on the machines it was started on.
    """
    where = find_device(device)
    counts = count_workers(workers)
    launched = is_worker_already()
    if print_launch is None:
        check_alone(hosts, interface)
    elif len(counts) > 1:
        raise UsageError(f"workers is {workers}; a launch script starts one number of them")
    if print_launch is not None or launched:
        asked = cluster_rates(rates)
    else:
        asked = possible_rates(rates, suite)
    shared = {"device": where, "amp": amp, "steps": steps, "seconds": seconds}
    if suite is not None:
        cells = _plan_suite(suite, model, asked, counts, shared)
    else:
        cells = plan_grid(
            models=split(model) or ["small"],
            methods=[*(ANCHORS if anchors else ()), *split(methods)],
            rates=asked,
            workers=counts,
            batch=batch,
            length=length,
            density=density,
            rank=rank,
            bucket_mb=bucket_mb,
            **shared,
        )
    if print_launch is not None:
        show_script(print_launch, context.find_root().obj, hosts, interface, counts[0])
        return
    book = RowBook(out)
    if dry_run and launched and os.environ["RANK"] != "0":
        return
    if dry_run:
        new = [cell.describe() for cell in cells if not book.has(cell, retry_failed=retry_failed)]
        show_plan(new, f"{where}, beside what is in {out} already")
        return
    with signals_as_exceptions(), choose_place(asked, where) as place:
        if isinstance(place, ClusterPlace) and place.rank:
            place.follow()
            return
        run_cells(cells, book, place, timeout_s=timeout, trace=trace, retry_failed=retry_failed)
    _show_rows(book, plots)


def _show_rows(book: RowBook, plots: bool) -> None:
    out = book.folder
    make_console().print(step_table(book.rows))
    typer.echo(f"rows: {out / 'rows.json'}, {out / 'rows.csv'}")
    if plots and importlib.util.find_spec("matplotlib") is not None:
        for path in draw_plots(book.rows, out):
            typer.echo(f"plot: {path}")


def _plan_suite(
    name: str,
    model: str | None,
    rates: list[str],
    workers: list[int],
    shared: dict[str, Any],
) -> list[StepCell]:
    plan = find_suite(name)
    if missing := missing_methods():
        typer.echo(
            f"left out, because thinwire does not have it yet: {', '.join(missing)}", err=True
        )
    cells = plan(model=model, rates=rates or [LOCAL], workers=max(workers), **shared)
    if rates == [CLUSTER]:
        # A launcher has started so many and no fewer.
        return [cell for cell in cells if cell.workers == max(workers)]
    return cells


def choose_place(rates: list[str], device: str) -> Place:
    """Where the cells run; rates are asked for only where they can be had."""
    if not rates:
        return LocalPlace()
    if rates == [CLUSTER]:
        return ClusterPlace()
    return LabPlace(mps=device == "cuda" and shutil.which(CONTROL) is not None)


def count_workers(asked: str | None) -> list[int]:
    """The numbers of workers: those asked for, or as many as a launcher has started."""
    counts = whole_numbers("workers", DEFAULT_WORKERS if asked is None else asked)
    if not counts:
        raise UsageError(f"workers is {asked!r}; it must be whole numbers, with commas")
    world = workers_started([] if asked is None else counts)
    return counts if world is None else [world]


def cluster_rates(asked: str | None) -> list[str]:
    """On machines that are there already the network is what it is."""
    if asked is not None:
        raise UsageError(
            f"rates is {asked!r}, but a launcher's machines have a network of their own; leave --rates out"
        )
    return [CLUSTER]


def possible_rates(asked: str | None, suite: str | None) -> list[str]:
    """The rates asked for, none if they cannot be had here, with a sentence that says why."""
    rates = find_rates(asked, suite)
    reason = why_no_lab() if rates else None
    if reason is None:
        return rates
    typer.echo(reason, err=True)
    return []


def find_device(name: str) -> str:
    check_choice("device", name, ("auto", "cpu", "cuda"))
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def find_rates(text: str | None, suite: str | None) -> list[str]:
    """The rates asked for, each a possible one whether or not it can be had here; a suite's own if none is named."""
    rates = split(text)
    for rate in rates:
        parse_rate(rate)
    if suite is not None and text is None and why_no_lab() is None:
        return list(NETWORKS)
    return rates


def split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def whole_numbers(field: str, text: str) -> list[int]:
    try:
        return [int(part) for part in split(text)]
    except ValueError:
        raise UsageError(f"{field} is {text!r}; it must be whole numbers, with commas") from None
