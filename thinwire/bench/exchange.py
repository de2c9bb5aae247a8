"""`thinwire bench exchange`: how sparse gradients travel, timed on a real group or counted on virtual ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from thinwire.bench.exchange_cases import ExchangePlan, run_name
from thinwire.bench.exchange_group import measure_group
from thinwire.bench.exchange_phases import draw_phases
from thinwire.bench.exchange_report import Row, show_rows, time_table, words_table
from thinwire.bench.exchange_virtual import measure_virtual
from thinwire.bench.ranks import run_ranks
from thinwire.errors import UsageError
from thinwire.tools.clusters import ClusterScript
from thinwire.tools.settings.building import check_fields
from thinwire.tools.settings.kinds import Count, NewFile, NewFolder
from thinwire.tools.settings.options import DryRun, command
from thinwire.tools.tables import show_plan
from thinwire.tools.traffic import Line, ledger_lines, write_lines


@dataclass(frozen=True, kw_only=True)
class ExchangeOutput:
    """What is written."""

    out: NewFolder | None = None
    """Folder for rows as CSV and JSON, and a plot."""
    ledger: NewFile | None = None
    """Traffic per rank, method and phase, as CSV."""
    phases: Count = 0
    """Only draw who sends what in which phase, on so many virtual ranks."""

    def __post_init__(self) -> None:
        check_fields(self)


@command
def bench_exchange(
    context: typer.Context,
    *,
    measured: ExchangePlan,
    output: ExchangeOutput,
    cluster: ClusterScript,
    dry_run: DryRun = False,
) -> None:
    """Compare exchanges: time, bandwidth and bytes as in nccl-tests, or words per rank against P.

    thinwire bench exchange --virtual 4,16,64,256 --count 262144 --out words
    """
    phases, ranks = output.phases, measured.ranks
    planned = [f"every exchange among {phases} ranks, one step, for a picture"]
    if not phases:
        planned = list_cases(measured)
    if cluster.wanted:
        cluster.show(context.find_root().obj, ranks)
    elif dry_run:
        show_plan(planned, "virtual ranks" if measured.virtual or phases else f"{ranks} processes")
    elif phases:
        typer.echo(f"wrote {draw_all_phases(phases, measured, output.out)}")
    elif measured.virtual:
        rows, lines = count_words(measured)
        if output.ledger is not None:
            write_lines(output.ledger, lines)
        show_rows(words_table(rows), rows, output.out, plot=True)
    else:
        rows = run_ranks(measure_group, ranks, measured, output.ledger)
        show_rows(time_table(rows), rows, output.out)


def list_cases(measured: ExchangePlan) -> list[str]:
    """What would be measured, in words; every method is built, so that settings it cannot have are refused."""
    cases = measured.cases()
    for case in cases:
        case.make(measured).compressor()
    return [
        f"{case.name}, {numel} elements, {world} ranks"
        for numel in measured.count
        for case in cases
        for world in measured.virtual or (measured.ranks,)
    ]


def count_words(measured: ExchangePlan) -> tuple[list[Row], list[Line]]:
    """(rows, the ledgers of all ranks)."""
    rows: list[Row] = []
    lines: list[Line] = []
    for numel in measured.count:
        for case in measured.cases():
            for world in measured.virtual:
                row, ledgers = measure_virtual(case, world, numel, measured)
                rows.append(row)
                for rank, ledger in enumerate(ledgers):
                    lines += ledger_lines(run_name(case.name, numel, world), rank, ledger)
    return rows, lines


def draw_all_phases(world: int, measured: ExchangePlan, out: Path | None) -> Path:
    """phases.png in the folder `out`."""
    if world < 2:
        raise UsageError(f"phases is {world}; it must be a number of ranks, 2 or more")
    if out is None:
        raise UsageError("phases needs a folder to draw into; give it with --out")
    out.mkdir(parents=True, exist_ok=True)
    return draw_phases(world, max(measured.count), measured.density, out / "phases.png")
