"""`thinwire bench compress`: the command line of the compression benchmark."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from thinwire.bench.compress import (
    DEFAULT_METHODS,
    CompressSettings,
    measure_compress,
    plan_cases,
)
from thinwire.bench.compress_anchors import ANCHORS
from thinwire.bench.compress_layout import describe_model
from thinwire.bench.compress_plots import draw_selection
from thinwire.bench.compress_rows import FLOOR, OK, CompressRow
from thinwire.bench.dry_run import DryRun, show_plan
from thinwire.bench.measure import check_device_name
from thinwire.bench.models import MODELS
from thinwire.errors import UsageError
from thinwire.methods.registry import parse_names
from thinwire.observe.tables import make_console

_METHODS = ",".join(DEFAULT_METHODS)

_Model = Annotated[
    str, typer.Option(help=f"One or more of {', '.join(MODELS)}, or your own as module:function.")
]
_Density = Annotated[str, typer.Option(help="Fractions kept, with commas.")]
_Device = Annotated[str, typer.Option(help="cpu (one thread) or cuda.")]
_Methods = Annotated[str, typer.Option(help="Names of thinwire's methods with commas, or all.")]
_Anchors = Annotated[
    bool, typer.Option("--anchors/--no-anchors", help=f"Measure {', '.join(ANCHORS)} as well.")
]
_Tensors = Annotated[
    bool, typer.Option("--tensors/--no-tensors", help="Measure every distinct tensor by itself.")
]
_World = Annotated[int, typer.Option(help="Workers whose payloads are decoded.")]
_BucketMb = Annotated[
    float | None, typer.Option(help="DDP's bucket size; a large one gives one bucket.")
]
_Repeats = Annotated[int, typer.Option(help="Timed laps per row.")]
_Seconds = Annotated[float, typer.Option(help="Fewer laps where they would take longer than this.")]
_Out = Annotated[Path, typer.Option(help="Folder of rows.json, rows.csv and the plot.")]
_Retry = Annotated[bool, typer.Option("--retry-failed", help="Measure failed rows again.")]


def bench_compress(
    model: _Model = "small",
    density: _Density = "0.01,0.001",
    device: _Device = "cpu",
    methods: _Methods = _METHODS,
    anchors: _Anchors = True,
    tensors: _Tensors = True,
    world: _World = 4,
    bucket_mb: _BucketMb = None,
    repeats: _Repeats = 20,
    seconds: _Seconds = 2.0,
    out: _Out = Path("runs/bench-compress"),
    retry_failed: _Retry = False,
    dry_run: DryRun = False,
) -> None:
    """Measure what compressing a whole model's gradient costs, against one pass over memory.

    thinwire bench compress --model bert-large --density 0.01,0.001 --device cuda

    Every row is saved at once; rows that are in the folder already are
    skipped, but for the floor, which every run measures anew.
    """
    models = [name.strip() for name in model.split(",") if name.strip()]
    names = parse_names(methods)
    compared = tuple(ANCHORS) if anchors else ()
    settings = CompressSettings(
        world=world, bucket_mb=bucket_mb, repeats=repeats, seconds=seconds, tensors=tensors
    )
    if dry_run:
        check_device_name(device)
        shapes = {name: describe_model(name) for name in models}
        cases = plan_cases(shapes, parse_densities(density), names, compared, tensors=tensors)
        show_plan([case.describe() for case in cases], device)
        return
    rows = measure_compress(
        models,
        parse_densities(density),
        device,
        methods=names,
        anchors=compared,
        settings=settings,
        out=out,
        retry_failed=retry_failed,
        say=typer.echo,
    )
    make_console().print(compress_table(rows))
    typer.echo(f"rows: {out / 'rows.json'}, {out / 'rows.csv'}")
    if importlib.util.find_spec("matplotlib") is not None and (path := draw_selection(rows, out)):
        typer.echo(f"plot: {path}")


def parse_densities(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"density is {text!r}; it must be numbers, with commas") from None


def compress_table(rows: Sequence[CompressRow]) -> Table:
    """One line per row of a whole model; single tensors are in the plot."""
    table = Table(title="compressing a whole gradient; the floor is one pass over memory")
    for title in ("model", "density", "method", "work"):
        table.add_column(title)
    for title in ("ms", "20 %", "80 %", "x floor", "host ms", "payload MB", "extra MB"):
        table.add_column(title, justify="right")
    last = None
    for row in sorted(rows, key=lambda row: row.model):
        if row.tensor is not None:
            continue
        if last not in (None, row.model):
            table.add_section()
        last = row.model
        density = "" if row.density is None else f"{row.density:g}"
        table.add_row(row.model, density, row.name, row.work, *_cells(row))
    return table


def _cells(row: CompressRow) -> list[str]:
    if row.status != OK:
        return ["failed"]
    name = "" if row.kind == FLOOR else _number(row.ratio, 2)
    times = [_number(value, 3) for value in (row.ms, row.ms_p20, row.ms_p80)]
    sizes = [_number(value, 2, 1e-6) for value in (row.payload_bytes, row.peak_extra_bytes)]
    return [*times, name, _number(row.host_ms, 3), *sizes]


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "" if value is None else f"{value * scale:,.{digits}f}"
