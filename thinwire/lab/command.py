"""`thinwire lab`: the command line of the emulated cluster."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from thinwire.errors import UsageError
from thinwire.lab.check import check
from thinwire.lab.counters import write_json
from thinwire.lab.lab import Lab, RunResult, check_command, clean, find_remains
from thinwire.lab.rates import UNSHAPED, format_rate
from thinwire.lab.report import check_table, traffic_table
from thinwire.lab.runner import print_line
from thinwire.lab.topology import LabSpec

CONTEXT_SETTINGS = {"allow_interspersed_args": False}
"""For `app.command`: options after the first word of COMMAND belong to COMMAND."""

EXIT_INTERRUPTED = 130


_Command = Annotated[
    list[str] | None, typer.Argument(metavar="-- COMMAND", help="Run once per rank.")
]
_Hosts = Annotated[int, typer.Option(help="Number of emulated hosts.")]
_Rate = Annotated[
    list[str] | None,
    typer.Option(help="Rate of each host's link, each way: 10gbit, or host2=1gbit for one."),
]
_RanksPerHost = Annotated[int, typer.Option(help="Processes per host.")]
_LocalRate = Annotated[str, typer.Option(help="Rate of the TCP traffic inside one host.")]
_Latency = Annotated[
    str, typer.Option(help="Delay added one way, such as 500us; needs the kernel's netem.")
]
_Check = Annotated[bool, typer.Option("--check", help="Measure every link; fail beyond 5 %.")]
_Clean = Annotated[
    bool, typer.Option("--clean", help="Remove what killed labs left, all or those named.")
]
_Counters = Annotated[
    Path | None, typer.Option(help="Write the interfaces' counters to this JSON file.")
]
_ShareGpu = Annotated[
    bool, typer.Option("--share-gpu", help="Let the ranks of one host share a GPU under NCCL.")
]
_Mps = Annotated[bool, typer.Option("--mps", help="Run NVIDIA's multi-process service meanwhile.")]
_Timeout = Annotated[
    float | None, typer.Option(help="End all ranks after this many seconds (exit code 124).")
]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show hosts, links and command, and start nothing.")
]


def lab(
    command: _Command = None,
    hosts: _Hosts = 2,
    rate: _Rate = None,
    ranks_per_host: _RanksPerHost = 1,
    local_rate: _LocalRate = UNSHAPED,
    latency: _Latency = "0ms",
    check_links: _Check = False,
    clean_up: _Clean = False,
    counters: _Counters = None,
    share_gpu: _ShareGpu = False,
    mps: _Mps = False,
    timeout: _Timeout = None,
    dry_run: _DryRun = False,
) -> None:
    """Run COMMAND on an emulated cluster: hosts on this machine, joined by slow links.

    thinwire lab --hosts 4 --rate 10gbit --rate host2=1gbit -- python train.py

    Every rank gets what torchrun would give it (RANK, WORLD_SIZE, ...)
    and runs in its host's network namespace. Afterwards a table shows the
    bytes that crossed each host's link. The exit code is the worst of all
    ranks. Needs root.
    """
    if clean_up:
        _clean(command or [], dry_run)
        return
    if timeout is not None and timeout <= 0:
        raise UsageError(f"timeout is {timeout:g}, but it must be above 0 seconds.")
    spec = LabSpec(
        hosts=hosts,
        rate=rate or UNSHAPED,
        ranks_per_host=ranks_per_host,
        local_rate=local_rate,
        latency=latency,
        share_gpu=share_gpu,
        mps=mps,
    )
    if command or not check_links:
        check_command(command or [])
    if dry_run:
        _show(spec, command or [], check_links)
        return
    try:
        if check_links:
            _check(spec)
        if command:
            _run(spec, command, counters, timeout)
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


def _check(spec: LabSpec) -> None:
    report = check(spec)
    Console().print(check_table(report))
    if not report.ok:
        typer.echo(report.advice, err=True)
        raise typer.Exit(1)


def _run(spec: LabSpec, command: list[str], counters: Path | None, timeout: float | None) -> None:
    with Lab(spec) as running:
        typer.echo(_describe(running), err=True)
        result = running.run(command, timeout_s=timeout, echo=print_line)
    Console().print(traffic_table(result.traffic))
    if counters is not None:
        _write_counters(counters, running, command, result)
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
