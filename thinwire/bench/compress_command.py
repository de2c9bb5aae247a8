"""`thinwire bench compress`: the command line of the compression benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from thinwire.bench.compress import DEFAULT_METHODS, CompressSettings, measure_compress, plan_cases
from thinwire.bench.compress_anchors import ANCHORS
from thinwire.bench.compress_layout import describe_model
from thinwire.bench.compress_plots import draw_selection
from thinwire.bench.compress_rows import FLOOR, CompressRow
from thinwire.bench.measure import check_device_name
from thinwire.bench.models import MODELS  # noqa: F401 (shown in a field's text)
from thinwire.tools.books import OK
from thinwire.tools.methods import expand_all
from thinwire.tools.settings.building import check_fields
from thinwire.tools.settings.kinds import NewFolder
from thinwire.tools.settings.options import DryRun, command
from thinwire.tools.tables import format_table, make_console, show_plan

COLUMNS = {
    "model": "{model}",
    "density": "{density:g}",
    "method": "{name}",
    "work": "{work}",
    "ms": "{ms:,.3f}",
    "20 %": "{ms_p20:,.3f}",
    "80 %": "{ms_p80:,.3f}",
    "x floor": "{ratio:,.2f}",
    "host ms": "{host_ms:,.3f}",
    "payload MB": "{payload_mb:,.2f}",
    "extra MB": "{extra_mb:,.2f}",
}


@dataclass(frozen=True, kw_only=True)
class CompressPlan:
    """What is compressed, by what."""

    model: tuple[str, ...] = ("small",)
    """One or more of {MODELS}, or your own as module:function."""
    density: tuple[float, ...] = (0.01, 0.001)
    """Fractions kept, with commas."""
    device: Annotated[str, "cpu|cuda"] = "cpu"
    """cpu uses one thread."""
    methods: tuple[str, ...] = DEFAULT_METHODS
    """Names of thinwire's methods with commas, or all."""
    anchors: bool = True
    """Measure {ANCHORS} as well."""

    def __post_init__(self) -> None:
        check_device_name(self.device)


@dataclass(frozen=True, kw_only=True)
class CompressOutput:
    """Where the rows are."""

    out: NewFolder = Path("runs/bench-compress")
    """Folder of rows.json, rows.csv and the plot."""
    retry_failed: bool = False
    """Measure failed rows again."""

    def __post_init__(self) -> None:
        check_fields(self)


@command
def bench_compress(
    *,
    measured: CompressPlan,
    timing: CompressSettings,
    output: CompressOutput,
    dry_run: DryRun = False,
) -> None:
    """Measure what compressing a whole model's gradient costs, against one pass over memory.

    thinwire bench compress --model bert-large --density 0.01,0.001 --device cuda

    Every row is saved at once; rows that are in the folder already are
    skipped, but for the floor, which every run measures anew.
    """
    names, out = expand_all(measured.methods), output.out
    compared = tuple(ANCHORS) if measured.anchors else ()
    if dry_run:
        shapes = {name: describe_model(name) for name in measured.model}
        cases = plan_cases(shapes, measured.density, names, compared, tensors=timing.tensors)
        show_plan([case.describe() for case in cases], measured.device)
        return
    rows = measure_compress(
        measured.model,
        measured.density,
        measured.device,
        methods=names,
        anchors=compared,
        settings=timing,
        out=out,
        retry_failed=output.retry_failed,
        say=typer.echo,
    )
    make_console().print(compress_table(rows))
    typer.echo(f"rows: {out / 'rows.json'}, {out / 'rows.csv'}")
    if find_spec("matplotlib") is not None and (path := draw_selection(rows, out)):
        typer.echo(f"plot: {path}")


def compress_table(rows: Sequence[CompressRow]) -> Table:
    """One line per row of a whole model; single tensors are in the plot."""
    whole = sorted((row for row in rows if row.tensor is None), key=lambda row: row.model)
    title = "compressing a whole gradient; the floor is one pass over memory"
    return format_table(
        COLUMNS, [describe_row(row) for row in whole], texts=4, section="model", title=title
    )


def describe_row(row: CompressRow) -> dict[str, object]:
    shown = asdict(row)
    for megabytes, size in (("payload_mb", row.payload_bytes), ("extra_mb", row.peak_extra_bytes)):
        shown[megabytes] = None if size is None else size / 1e6
    if row.status != OK:
        shown["work"] = "failed"
    return {**shown, "ratio": None} if row.kind == FLOOR else shown
