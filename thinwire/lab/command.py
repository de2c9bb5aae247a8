"""`thinwire lab`: the command line of the emulated cluster."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from thinwire.lab.check import CheckReport, check
from thinwire.lab.counters import write_json
from thinwire.lab.lab import Lab, RunResult, check_command, clean, find_remains
from thinwire.lab.rates import format_rate
from thinwire.lab.report import check_table, traffic_table
from thinwire.lab.rerouting import BY_RELAY
from thinwire.lab.runner import print_line
from thinwire.lab.topology import LabSpec
from thinwire.tools.settings.building import check_fields
from thinwire.tools.settings.kinds import NewFile, PositiveNumber
from thinwire.tools.settings.options import DryRun, command

CONTEXT_SETTINGS = {"allow_interspersed_args": False}
"""For `app.command`: options after the first word of COMMAND belong to COMMAND."""

EXIT_INTERRUPTED = 130


Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- COMMAND", help="Run once per rank.", show_default=False),
]


@dataclass(frozen=True, kw_only=True)
class Actions:
    """What is done beside running the command, or instead of it."""

    check: bool = False
    """Measure every link; fail beyond 5 %."""
    clean: bool = False
    """Remove what killed labs left, all or those named."""
    counters: NewFile | None = None
    """Write the interfaces' counters there, as JSON."""
    timeout: Annotated[PositiveNumber | None, "SECONDS"] = None
    """End all ranks after so long (exit code 124)."""
    as_root: bool = False
    """Under sudo, run COMMAND as root too, and not as you."""

    def __post_init__(self) -> None:
        check_fields(self)


@command
def lab(
    words: Command = None, *, cluster: LabSpec, actions: Actions, dry_run: DryRun = False
) -> None:
    """Run COMMAND on an emulated cluster: hosts on this machine, joined by slow links.

    thinwire lab --hosts 4 --rate 10gbit --rate host2=1gbit -- python train.py

    Every rank gets what torchrun would give it (RANK, WORLD_SIZE, ...)
    and runs in its host's network namespace. Afterwards a table shows the
    bytes that crossed each host's link. The exit code is the worst of all
    ranks. Needs root; COMMAND itself runs as the user who called sudo.
    """
    program = words or []
    if actions.clean:
        _clean(program, dry_run)
        return
    if program or not actions.check:
        check_command(program)
    if dry_run:
        _show(cluster, program, actions.check)
        return
    try:
        if actions.check:
            show_check(check(cluster))
        if program:
            _run(cluster, program, actions)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _clean(names: list[str], dry_run: bool) -> None:
    removed = [record.name for record in find_remains(names)] if dry_run else clean(names)
    said = "would be removed" if dry_run else "removed"
    typer.echo(f"{said}: {', '.join(removed)}" if removed else "nothing was left behind")


def _show(spec: LabSpec, command: list[str], check_links: bool) -> None:
    """What a lab would be and run; the ranks are numbered host by host."""
    for index, rate in enumerate(spec.rates):
        first = index * spec.ranks_per_host
        last = first + spec.ranks_per_host - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        typer.echo(f"host{index + 1}: link {format_rate(rate)}, {ranks}")
    typer.echo(f"inside a host: {spec.local_rate}; added latency: {spec.latency}")
    if check_links:
        typer.echo("measured: every link alone and all at once")
    if command:
        typer.echo(f"each rank runs: {shlex.join(command)}")


def show_check(report: CheckReport) -> None:
    """Print what was measured; ends the command if a link does not hold its rate."""
    Console().print(check_table(report))
    if not report.ok:
        typer.echo(report.advice, err=True)
        raise typer.Exit(1)


def _run(spec: LabSpec, command: list[str], actions: Actions) -> None:
    with Lab(spec) as running:
        typer.echo(_describe(running), err=True)
        if running.relayed:
            typer.echo(f"latency {spec.latency}: {BY_RELAY}", err=True)
        result = running.run(
            command, timeout_s=actions.timeout, echo=print_line, as_root=actions.as_root
        )
    Console().print(traffic_table(result.traffic))
    if actions.counters is not None:
        _write_counters(actions.counters, running, command, result)
    if result.reason:
        typer.echo(f"lab {running.name}: {result.reason}", err=True)
    raise typer.Exit(result.exit_code)


def _describe(running: Lab) -> str:
    spec = running.spec
    rates = [format_rate(rate) for rate in spec.rates]
    links = rates[0] if len(set(rates)) == 1 else ", ".join(rates)
    per_host = spec.ranks_per_host
    return f"lab {running.name}: hosts {spec.hosts}, ranks per host {per_host}, links {links}"


def _write_counters(path: Path, running: Lab, command: list[str], result: RunResult) -> None:
    write_json(
        path,
        result.traffic.as_rows(),
        lab=running.name,
        command=command,
        ranks_per_host=running.spec.ranks_per_host,
        local_rate=running.spec.local_rate,
        latency=running.spec.latency,
        exit_code=result.exit_code,
        seconds=round(result.seconds, 3),
    )
