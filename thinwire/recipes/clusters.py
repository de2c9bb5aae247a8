"""Cluster launch scripts: a command of thinwire on several machines, as text for SLURM, PBS or plain ssh.

Every machine runs torchrun once, which starts that machine's workers; the first machine is where they meet.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from thinwire.errors import UsageError
from thinwire.validate import check_choice, check_positive_int

KINDS = ("slurm", "pbs", "torchrun")
PORTS = "20000 + {} % 10000"
"""Where workers meet, so that two jobs on one machine do not; MASTER_PORT wins."""
LOCAL = ("localhost", "127.0.0.1")
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:-]*[A-Za-z0-9])?")
INTERFACE = re.compile(r"[A-Za-z0-9._@,=^-]+")
DROPPED = ("--print-launch", "--hosts", "--interface", "--workers", "--ranks")
"""Options that are for the script and not in it: under torchrun the number of workers is torchrun's."""

PrintLaunch = Annotated[
    str | None,
    typer.Option(
        "--print-launch",
        help="Only print a script that runs this on a cluster: slurm, pbs or torchrun (ssh).",
        metavar="KIND",
    ),
]
HostsFile = Annotated[
    Path | None,
    typer.Option(
        "--hosts", help="With --print-launch: a line per machine, NAME \\[slots=N].", metavar="FILE"
    ),
]
Interface = Annotated[
    str | None,
    typer.Option(
        help="With --print-launch: the network interface to use, such as eth0.", metavar="NAME"
    ),
]


@dataclass(frozen=True)
class Host:
    """A machine and how many workers it gets."""

    name: str
    slots: int | None = None
    """None: as many as the command says."""


def show_script(
    kind: str, typed: Sequence[str], hosts: Path | None, interface: str | None, per_host: int | None
) -> None:
    """Print the script for a command line as the user typed it, --print-launch and all."""
    script = launch_script(
        kind,
        drop_options(typed),
        hosts=read_hosts(hosts) if hosts is not None else [],
        interface=interface,
        per_host=per_host or 1,
    )
    print(script, end="")


def check_alone(hosts: Path | None, interface: str | None) -> None:
    """Refuse what a command that starts at once would not heed."""
    for field, value in (("hosts", hosts), ("interface", interface)):
        if value is not None:
            raise UsageError(f"{field} is {str(value)!r}, which goes only with --print-launch")


def launch_script(
    kind: str,
    arguments: Sequence[str],
    *,
    hosts: Sequence[Host] = (),
    interface: str | None = None,
    per_host: int = 1,
    python: str = sys.executable,
    folder: str | None = None,
) -> str:
    """A bash script that runs `thinwire arguments` with torchrun on every host.

    `per_host` is the number of workers on hosts without slots. SLURM and PBS give the job its machines; `hosts` are then
    the ones to ask for, and none leaves that to the command that submits. `folder` is where the command runs, this one
    unless given.
    """
    check_choice("print_launch", kind, KINDS)
    check_positive_int("per_host", per_host)
    if interface is not None and not INTERFACE.fullmatch(interface):
        raise UsageError(
            f"interface is {interface!r}; it must be the name of a network interface, such as eth0"
        )
    machines = [Host(host.name, host.slots or per_host) for host in hosts]
    run = Run(tuple(arguments), interface, python, folder or str(Path.cwd()))
    match kind:
        case "slurm":
            return slurm_script(run, machines, per_host)
        case "pbs":
            return pbs_script(run, machines, per_host)
        case _:
            return ssh_script(run, machines)


def read_hosts(path: Path) -> list[Host]:
    """A line per machine: NAME [slots=N]; # begins a comment."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"hosts is '{path}', which cannot be read: {error}") from None
    found: list[Host] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            found.append(read_host(words, f"line {number} of {path}"))
    if not found:
        raise UsageError(
            f"hosts is '{path}', which names no machine; write one per line: NAME [slots=N]"
        )
    names = [host.name for host in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"hosts names {twice!r} twice; write it once, with slots=N for N workers")
    return found


def read_host(words: Sequence[str], where: str) -> Host:
    name, *rest = words
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{where} names the machine {name!r}; it must be a host name or an address"
        )
    if not rest:
        return Host(name)
    key, _, value = rest[0].partition("=")
    if len(rest) > 1 or key != "slots" or not value.isdecimal() or int(value) < 1:
        raise UsageError(f"{where} is {' '.join(words)!r}; it must be NAME or NAME slots=N")
    return Host(name, int(value))


def drop_options(typed: Sequence[str]) -> list[str]:
    """A command line without the options that are for the script."""
    kept: list[str] = []
    words = iter(typed)
    for word in words:
        if word in DROPPED:
            next(words, None)
        elif word.partition("=")[0] not in DROPPED:
            kept.append(word)
    return kept


# -- the scripts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What every machine runs."""

    arguments: tuple[str, ...]
    interface: str | None
    python: str
    folder: str

    @property
    def name(self) -> str:
        words = [word for word in self.arguments[:2] if not word.startswith("-")]
        return re.sub(r"[^A-Za-z0-9-]", "-", "-".join(["thinwire", *words]))

    def exports(self) -> list[str]:
        """For gloo and for NCCL; without an interface both choose one themselves."""
        if self.interface is None:
            return []
        return [f"{kind}_SOCKET_IFNAME={shlex.quote(self.interface)}" for kind in ("GLOO", "NCCL")]

    def port(self, job_number: str) -> str:
        return f"port=${{MASTER_PORT:-$(({PORTS.format(job_number)}))}}"

    def torchrun(self, nodes: str, workers: str, job: str, head: str, more: str = "") -> str:
        """The command in bash; what is passed in are bash words already."""
        words = [
            f"{shlex.quote(self.python)} -m torch.distributed.run",
            f"--nnodes {nodes} --nproc-per-node {workers}",
            f"--rdzv-id {job} --rdzv-backend c10d --rdzv-endpoint {head}:$port{more}",
            f"-m thinwire {shlex.join(self.arguments)}",
        ]
        return " \\\n    ".join(words)


def slurm_script(run: Run, hosts: Sequence[Host], per_host: int) -> str:
    workers = same_slots(hosts, per_host)
    lines = ["#!/bin/bash", f"#SBATCH --job-name={run.name}", "#SBATCH --ntasks-per-node=1"]
    if hosts:
        lines += [
            f"#SBATCH --nodes={len(hosts)}",
            f"#SBATCH --nodelist={','.join(host.name for host in hosts)}",
        ]
    lines += [
        f"##SBATCH --cpus-per-task={workers}",
        f"##SBATCH --gpus-per-node={workers}",
        "# Take one # off the lines above where the cluster wants to be asked for cores or GPUs.",
        "set -euo pipefail",
        f"cd {shlex.quote(run.folder)}",
        *(f"export {setting}" for setting in run.exports()),
        # Not `head -n 1`: it would end scontrol by a broken pipe.
        """head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)""",
        run.port("SLURM_JOB_ID"),
        "srun --kill-on-bad-exit=1 "
        + run.torchrun('"$SLURM_JOB_NUM_NODES"', str(workers), '"$SLURM_JOB_ID"', '"$head_node"'),
    ]
    return "\n".join(lines) + "\n"


def pbs_script(run: Run, hosts: Sequence[Host], per_host: int) -> str:
    workers = same_slots(hosts, per_host)
    lines = ["#!/bin/bash", f"#PBS -N {run.name[:15]}", "#PBS -j oe"]
    if hosts:
        chunks = (f"1:host={host.name}:ncpus={workers}:mpiprocs=1" for host in hosts)
        lines += [f"#PBS -l select={'+'.join(chunks)}", "#PBS -l place=scatter"]
    lines += [
        "set -euo pipefail",
        """mapfile -t hosts < <(awk '!seen[$0]++' "$PBS_NODEFILE")""",
        "job=${PBS_JOBID%%[!0-9]*}",
        run.port("job"),
        *start_on_hosts(run, str(workers)),
    ]
    return "\n".join(lines) + "\n"


def ssh_script(run: Run, hosts: Sequence[Host]) -> str:
    if not hosts:
        raise UsageError(
            "print_launch is 'torchrun' without hosts; give the machines with --hosts FILE"
        )
    local = [host.name for host in hosts if host.name in LOCAL]
    if local and len(hosts) > 1:
        raise UsageError(
            f"hosts names {local[0]!r} beside other machines, which cannot reach it by that name; use its own"
        )
    lines = [
        "#!/bin/bash",
        "set -euo pipefail",
        f"hosts=({shlex.join(host.name for host in hosts)})",
        f"slots=({' '.join(str(host.slots) for host in hosts)})",
        "job=$$",
        run.port("job"),
        *start_on_hosts(run, '"${slots[index]}"'),
    ]
    return "\n".join(lines) + "\n"


def start_on_hosts(run: Run, workers: str) -> list[str]:
    """Bash that starts the command on every one of `hosts`, here or by ssh, and waits for all of them."""
    # By the name that the others know it by, not by the one it has for itself.
    own_name = ' --local-addr "$host"'
    command = run.torchrun("${#hosts[@]}", workers, "$job", '"${hosts[0]}"', own_name)
    settings = " ".join(["env", *run.exports()])
    return [
        f"folder={shlex.quote(run.folder)}",
        'remote_shell=${REMOTE_SHELL:-"ssh -n -tt -o BatchMode=yes"}',
        "pids=()",
        """trap 'kill "${pids[@]}" 2>/dev/null || true' INT TERM""",
        'for index in "${!hosts[@]}"; do',
        "  host=${hosts[index]}",
        f"  command=({settings} {command})",
        '  case "$host" in',
        f'    {"|".join(LOCAL)}|"$HOSTNAME"|"${{HOSTNAME%%.*}}") (cd "$folder" && exec "${{command[@]}}") & ;;',
        """    *) $remote_shell "$host" "cd $(printf %q "$folder") && exec $(printf '%q ' "${command[@]}")" & ;;""",
        "  esac",
        "  pids+=($!)",
        "done",
        "status=0",
        'for pid in "${pids[@]}"; do wait "$pid" || status=$?; done',
        'exit "$status"',
    ]


def same_slots(hosts: Sequence[Host], per_host: int) -> int:
    counts = {host.slots or per_host for host in hosts} or {per_host}
    if len(counts) > 1:
        raise UsageError(
            f"hosts have different slots {sorted(counts)}; under slurm and pbs every machine runs the same number of workers"
        )
    return counts.pop()
