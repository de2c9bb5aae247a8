"""`thinwire bench exchange`: how sparse gradients travel, timed on a real group or counted on virtual ranks."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from thinwire.bench.dry_run import DryRun, show_plan
from thinwire.bench.exchange_cases import CASES, find_cases, run_name
from thinwire.bench.exchange_group import measure_group
from thinwire.bench.exchange_phases import draw_phases
from thinwire.bench.exchange_virtual import measure_virtual
from thinwire.bench.lowrank import SHAPES, LowRankRow, find_ranks, format_rows, measure_models
from thinwire.errors import UsageError
from thinwire.observe.files import write_text
from thinwire.observe.ledger import Line, check_ledger_path, ledger_lines, write_lines
from thinwire.observe.provenance import describe_origin
from thinwire.observe.tables import make_console
from thinwire.recipes.clusters import HostsFile, Interface, PrintLaunch, check_alone, show_script
from thinwire.validate import check_density, check_positive_int

Row = dict[str, Any]

_Methods = Annotated[str, typer.Option(help=f"'all' or some of {', '.join(CASES)}.")]
_Ranks = Annotated[int, typer.Option(help="Processes to start (not under torchrun).")]
_Virtual = Annotated[
    str, typer.Option(help="Count words on so many virtual ranks instead: 4,16,64,256.")
]
_Count = Annotated[str, typer.Option(help="Elements of the gradient, comma-separated.")]
_Density = Annotated[float, typer.Option(help="Fraction kept.")]
_Values = Annotated[str, typer.Option(help="Value code: fp32, bf16 or fp16.")]
_Iters = Annotated[int, typer.Option(help="Steps to measure.")]
_Out = Annotated[Path | None, typer.Option(help="Folder for rows as CSV and JSON, and a plot.")]
_Ledger = Annotated[
    Path | None,
    typer.Option("--ledger", help="Traffic per rank, method and phase, as CSV.", metavar="FILE"),
]
_Phases = Annotated[
    int, typer.Option(help="Only draw who sends what in which phase, on so many virtual ranks.")
]
_LowRank = Annotated[
    bool,
    typer.Option("--lowrank", help="Time what --models send: dense, as factors P, as factors Q."),
]
_Models = Annotated[str, typer.Option(help=f"With --lowrank: some of {', '.join(SHAPES)}.")]
_Rank = Annotated[
    int | None, typer.Option(help="With --lowrank: columns of the factors; else the paper's.")
]


def bench_exchange(
    context: typer.Context,
    methods: _Methods = "all",
    ranks: _Ranks = 4,
    virtual: _Virtual = "",
    count: _Count = "1048576",
    density: _Density = 0.01,
    values: _Values = "fp32",
    iters: _Iters = 10,
    out: _Out = None,
    ledger: _Ledger = None,
    phases: _Phases = 0,
    lowrank: _LowRank = False,
    models: _Models = "resnet50",
    rank: _Rank = None,
    print_launch: PrintLaunch = None,
    hosts: HostsFile = None,
    interface: Interface = None,
    dry_run: DryRun = False,
) -> None:
    """Compare exchanges: time, bandwidth and bytes as in nccl-tests, or words per rank against P.

    Example: thinwire bench exchange --virtual 4,16,64,256 --count 262144 --out words
    """
    for field, number in (("ranks", ranks), ("iters", iters)):
        check_positive_int(field, number)
    check_density("density", density)
    sizes = parse_numbers("count", count)
    worlds = parse_numbers("virtual", virtual) if virtual else []
    if lowrank:
        planned = [f"{model}, rank {wide}" for model, wide in find_ranks(models, rank).items()]
    elif phases:
        planned = [f"every exchange among {phases} ranks, one step, for a picture"]
    else:
        planned = list_cases(methods, sizes, worlds or [ranks], density, values)
    if ledger is not None:
        check_ledger_path(ledger)
    if print_launch is not None:
        show_script(print_launch, context.find_root().obj, hosts, interface, ranks)
        return
    check_alone(hosts, interface)
    if dry_run:
        show_plan(planned, "virtual ranks" if worlds or phases else f"{ranks} processes")
    elif lowrank:
        show_lowrank(measure_models(models, ranks, rank, iters), out)
    elif phases:
        typer.echo(f"wrote {draw_all_phases(phases, sizes, density, out)}")
    elif worlds:
        rows, lines = count_words(methods, worlds, sizes, density, values, iters)
        if ledger is not None:
            write_lines(ledger, lines)
        show_rows(words_table(rows), rows, out, plot=True)
    else:
        rows = measure_group(methods, ranks, sizes, density, values, iters, ledger)
        show_rows(time_table(rows), rows, out, plot=False)


def show_rows(table: Table, rows: Sequence[Row], out: Path | None, *, plot: bool) -> None:
    console = make_console()
    console.print(table)
    if out is not None and rows:
        for path in write_rows(rows, out, plot=plot):
            console.print(f"wrote {path}")


def show_lowrank(rows: Sequence[LowRankRow], out: Path | None) -> None:
    """Rows come to the first rank only."""
    if rows:
        typer.echo(format_rows(rows))
    if rows and out is not None:
        for path in write_rows([dataclasses.asdict(row) for row in rows], out, plot=False):
            typer.echo(f"wrote {path}")


def list_cases(
    methods: str, sizes: Sequence[int], worlds: Sequence[int], density: float, values: str
) -> list[str]:
    """What would be measured, in words; every method is built, so that settings it cannot have are refused."""
    cases = find_cases(methods)
    for case in cases:
        case.make(density, values).compressor()
    return [
        f"{case.name}, {numel} elements, {world} ranks"
        for numel in sizes
        for case in cases
        for world in worlds
    ]


def parse_numbers(field: str, text: str) -> list[int]:
    """Whole numbers from "4,16,64"."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UsageError(f"{field} is {text!r}; it must be whole numbers such as 4,16,64")
    return numbers


def count_words(
    methods: str,
    worlds: Sequence[int],
    sizes: Sequence[int],
    density: float,
    values: str,
    steps: int,
) -> tuple[list[Row], list[Line]]:
    """(rows, the ledgers of all ranks)."""
    rows: list[Row] = []
    lines: list[Line] = []
    for numel in sizes:
        for case in find_cases(methods):
            for world in worlds:
                row, ledgers = measure_virtual(case, world, numel, density, values, steps)
                rows.append(row)
                for rank, ledger in enumerate(ledgers):
                    lines += ledger_lines(run_name(case.name, numel, world), rank, ledger)
    return rows, lines


def draw_all_phases(world: int, sizes: Sequence[int], density: float, out: Path | None) -> Path:
    """phases.png in the folder `out`."""
    if world < 2:
        raise UsageError(f"phases is {world}; it must be a number of ranks, 2 or more")
    if out is None:
        raise UsageError("phases needs a folder to draw into; give it with --out")
    out.mkdir(parents=True, exist_ok=True)
    return draw_phases(world, max(sizes), density, out / "phases.png")


def words_table(rows: Sequence[Row]) -> Table:
    """Words per rank and step beside each method's formula."""
    table = Table(title="words of 4 bytes per rank and step; payload only")
    for name in ("method", "ranks", "count", "k"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for name in (
        "words/k",
        "x P/(P-1)",
        "busiest",
        "formula",
        "allows",
        "padding",
        "control",
        "contraction",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["method"],
            *(f"{row[name]:,}" for name in ("ranks", "count", "k")),
            f"{row['words_per_k']:.2f}",
            f"{row['flat']:.2f}",
            f"{row['words']:,.0f}" + ("" if row["inside"] else " !"),
            row["formula"],
            f"{row['formula_words']:,.0f}",
            f"{row['padding']:.1%}",
            f"{row['control']:.1%}",
            f"{row['contraction']:.2f}",
        )
    return table


def time_table(rows: Sequence[Row]) -> Table:
    """The columns of nccl-tests, then what sparse exchanges add."""
    table = Table(title="times are medians; bandwidths in GB/s of the dense gradient")
    for name in ("method", "size", "count", "type", "time us", "algbw", "busbw", "wrong"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for name in ("wire bytes", "ratio", "encode us", "exchange us", "decode us", "error"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["method"],
            f"{row['size']:,}",
            f"{row['count']:,}",
            row["type"],
            f"{row['time_us']:,.0f}",
            f"{row['algbw']:.3f}",
            f"{row['busbw']:.3f}",
            str(row["wrong"]),
            f"{row['wire_bytes']:,.0f}",
            f"{row['ratio']:.1f}",
            *(f"{row[name]:,.0f}" for name in ("encode_us", "exchange_us", "decode_us")),
            f"{row['error']:.3f}",
        )
    return table


def write_rows(rows: Sequence[Row], folder: Path, *, plot: bool) -> list[Path]:
    """rows.csv, rows.json with what they were measured on, and words.png where there is something to draw."""
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    written = [folder / "rows.csv", folder / "rows.json"]
    write_text(written[0], text.getvalue())
    write_text(written[1], json.dumps({"origin": describe_origin(), "rows": list(rows)}, indent=1))
    if plot:
        written.append(draw_words(rows, folder / "words.png"))
    return written


def draw_words(rows: Sequence[Row], path: Path) -> Path:
    """Words per entry kept against the number of ranks, one line per method, log-log."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UsageError(
            "the plot needs the package 'matplotlib', which is not installed; the rows are complete without it"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5), layout="constrained")
    largest = max(row["count"] for row in rows)
    for name in dict.fromkeys(row["method"] for row in rows):
        points = sorted(
            (row["ranks"], row["words_per_k"])
            for row in rows
            if row["method"] == name and row["count"] == largest
        )
        axes.plot([p for p, _ in points], [words for _, words in points], "o-", label=name)
    axes.set(
        xscale="log", yscale="log", xlabel="ranks", ylabel="words per rank, step and entry kept"
    )
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
