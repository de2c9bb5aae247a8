"""Launch files: a command on several machines, as a bash script for SLURM, PBS or plain ssh.

Every machine runs torchrun once, which starts that machine's workers; the first machine is where they meet.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from thinwire.errors import UsageError
from thinwire.tools.hosts import Host, same_slots
from thinwire.tools.settings.building import check_fields
from thinwire.tools.settings.kinds import Positive
from thinwire.validate import check_choice, check_instance, check_positive_int

KINDS = ("slurm", "pbs", "torchrun")
PORTS = "20000 + {} % 10000"
"""Where workers meet, so that two jobs on one machine do not; MASTER_PORT wins."""
LOCAL = ("localhost", "127.0.0.1")
INTERFACE = re.compile(r"[A-Za-z0-9._@,=^-]+")
TIME = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")
LOOK_FOR_DATA = (
    'for path; do [ -e "$path" ] || { echo "$HOSTNAME has no $path" >&2; exit 1; }; done'
)
AGAIN = (
    "interrupted; start this file again, and the job goes on from its last checkpoint if its command loads one "
    "(thinwire train --resume, tw.elastic.Snapshots in a script of your own)"
)


def check_time(name: str, value: Any) -> None:
    if not isinstance(value, str) or not TIME.fullmatch(value):
        raise UsageError(f"{name} is {value!r}; it must be HH:MM:SS or DAYS-HH:MM:SS")


def check_word(name: str, value: Any) -> None:
    """A text that stands in a line of the cluster's own language."""
    check_instance(name, value, str, "a text")
    if not value or re.search(r"[\s#]", value):
        raise UsageError(f"{name} is {value!r}; it must be a name without spaces")


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the job asks of the cluster."""

    nodes: Positive | None = None
    """Machines; those of --hosts, or what the submitting command says, unless given."""
    time: Annotated[str | None, check_time, "HH:MM:SS"] = None
    """The longest that it may run; DAYS-HH:MM:SS too."""
    partition: Annotated[str | None, check_word, "NAME"] = None
    """SLURM's partition, or the queue of PBS."""
    account: Annotated[str | None, check_word, "NAME"] = None
    """Account that pays for the job."""
    output: Annotated[str | None, check_word, "FILE"] = None
    """File for all that the job prints."""
    requeue: bool = False
    """Start it again when a machine fails or a more urgent job takes its place; it must load its own checkpoint."""
    data: Annotated[tuple[str, ...], "PATHS"] = ()
    """Files or folders, with commas, that every machine must have before anything starts."""

    def __post_init__(self) -> None:
        check_fields(self)

    def refuse_a_queue(self) -> None:
        """Plain ssh has none."""
        for name in ("nodes", "time", "partition", "account", "requeue"):
            value = getattr(self, name)
            if value:
                raise UsageError(
                    f"{name} is {value!r}, which goes with slurm and pbs; torchrun by ssh has no queue to ask"
                )


@dataclass(frozen=True, kw_only=True)
class MachineCommand:
    """What every machine runs."""

    program: tuple[str, ...]
    """Words for torchrun: a script or `-m module`, and its arguments."""
    name: str
    """Of the job."""
    interface: str | None
    python: str
    folder: str
    terms: Terms

    def exports(self) -> list[str]:
        """For gloo and for NCCL; without an interface both choose one themselves."""
        if self.interface is None:
            return []
        return [f"{kind}_SOCKET_IFNAME={shlex.quote(self.interface)}" for kind in ("GLOO", "NCCL")]

    def port(self, job_number: str) -> str:
        return f"port=${{MASTER_PORT:-$(({PORTS.format(job_number)}))}}"

    def look_for_data(self) -> str | None:
        """A command in bash that fails where something is missing."""
        words = ["bash", "-c", LOOK_FOR_DATA, "look", *self.terms.data]
        return shlex.join(words) if self.terms.data else None

    def torchrun(self, nodes: str, workers: str, job: str, head: str, more: str = "") -> str:
        """The command in bash; what is passed in are bash words already."""
        words = [
            f"{shlex.quote(self.python)} -m torch.distributed.run",
            f"--nnodes {nodes} --nproc-per-node {workers}",
            f"--rdzv-id {job} --rdzv-backend c10d --rdzv-endpoint {head}:$port{more}",
            shlex.join(self.program),
        ]
        return " \\\n    ".join(words)


def launch_file(
    kind: str,
    program: Sequence[str],
    *,
    name: str = "thinwire",
    hosts: Sequence[Host] = (),
    interface: str | None = None,
    per_host: int = 1,
    python: str = sys.executable,
    folder: str | None = None,
    terms: Terms | None = None,
) -> str:
    """A bash script that runs `program` (words for torchrun) on every host.

    `per_host` is the number of workers on hosts without slots. SLURM and PBS give the job its machines: `hosts` are those to ask for,
    and without any the command that submits decides. `folder` is where the command runs, this one unless given.
    """
    check_choice("launcher", kind, KINDS)
    check_positive_int("per_host", per_host)
    terms = Terms() if terms is None else terms
    if interface is not None and not INTERFACE.fullmatch(interface):
        raise UsageError(
            f"interface is {interface!r}; it must be the name of a network interface, such as eth0"
        )
    if terms.nodes is not None and hosts and terms.nodes != len(hosts):
        raise UsageError(f"nodes is {terms.nodes}, but hosts names {len(hosts)}; leave one out")
    machines = [Host(host.name, host.slots or per_host) for host in hosts]
    run = MachineCommand(
        program=tuple(program),
        name=re.sub(r"[^A-Za-z0-9-]", "-", name),
        interface=interface,
        python=python,
        folder=folder or str(Path.cwd()),
        terms=terms,
    )
    match kind:
        case "slurm":
            lines = slurm_file(run, machines, per_host)
        case "pbs":
            lines = pbs_file(run, machines, per_host)
        case _:
            lines = ssh_file(run, machines)
    return "\n".join(lines) + "\n"


def slurm_file(run: MachineCommand, hosts: Sequence[Host], per_host: int) -> list[str]:
    workers, terms = same_slots(hosts, per_host), run.terms
    asked = {
        "job-name": run.name,
        "ntasks-per-node": 1,
        "nodes": len(hosts) or terms.nodes,
        "nodelist": ",".join(host.name for host in hosts),
        "time": terms.time,
        "partition": terms.partition,
        "account": terms.account,
        "output": terms.output,
    }
    look = run.look_for_data()
    command = run.torchrun(
        '"$SLURM_JOB_NUM_NODES"', str(workers), '"$SLURM_JOB_ID"', '"$head_node"'
    )
    return [
        "#!/bin/bash",
        *(f"#SBATCH --{name}={value}" for name, value in asked.items() if value),
        *(["#SBATCH --requeue", "#SBATCH --open-mode=append"] if terms.requeue else []),
        f"##SBATCH --cpus-per-task={workers}",
        f"##SBATCH --gpus-per-node={workers}",
        "# Take one # off the lines above where the cluster wants to be asked for cores or GPUs.",
        "set -euo pipefail",
        f"cd {shlex.quote(run.folder)}",
        *(f"export {setting}" for setting in run.exports()),
        # Not `head -n 1`: it would end scontrol by a broken pipe.
        """head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)""",
        run.port("SLURM_JOB_ID"),
        *([f"srun --kill-on-bad-exit=1 {look}"] if look else []),
        f"srun --kill-on-bad-exit=1 {command}",
    ]


def pbs_file(run: MachineCommand, hosts: Sequence[Host], per_host: int) -> list[str]:
    workers, terms = same_slots(hosts, per_host), run.terms
    chunks = [f"1:host={host.name}:ncpus={workers}:mpiprocs=1" for host in hosts]
    if not hosts and terms.nodes is not None:
        chunks = [f"{terms.nodes}:ncpus={workers}:mpiprocs=1"]
    asked = {
        "N": run.name[:15],
        "j": "oe",
        "l walltime": hours(terms.time),
        "q": terms.partition,
        "A": terms.account,
        "o": terms.output,
        "r": "y" if terms.requeue else None,
    }
    lines = [
        f"#PBS -{name}{'=' if ' ' in name else ' '}{value}"
        for name, value in asked.items()
        if value
    ]
    if chunks:
        lines += [f"#PBS -l select={'+'.join(chunks)}", "#PBS -l place=scatter"]
    return [
        "#!/bin/bash",
        *lines,
        "set -euo pipefail",
        """mapfile -t hosts < <(awk '!seen[$0]++' "$PBS_NODEFILE")""",
        "job=${PBS_JOBID%%[!0-9]*}",
        run.port("job"),
        *start_on_hosts(run, str(workers)),
    ]


def hours(time: str | None) -> str | None:
    """PBS counts no days."""
    found = TIME.fullmatch(time or "")
    if found is None:
        return None
    days, whole, minutes, seconds = found.groups()
    return f"{24 * int(days or 0) + int(whole):02}:{minutes}:{seconds}"


def ssh_file(run: MachineCommand, hosts: Sequence[Host]) -> list[str]:
    if not hosts:
        raise UsageError(
            "the launcher is torchrun and there are no hosts; give the machines with --hosts FILE"
        )
    run.terms.refuse_a_queue()
    local = [host.name for host in hosts if host.name in LOCAL]
    if local and len(hosts) > 1:
        raise UsageError(
            f"hosts names {local[0]!r} beside other machines, which cannot reach it by that name; use its own"
        )
    output = run.terms.output
    return [
        "#!/bin/bash",
        "set -euo pipefail",
        *([f"exec > {shlex.quote(output)} 2>&1"] if output else []),
        f"hosts=({shlex.join(host.name for host in hosts)})",
        f"slots=({' '.join(str(host.slots) for host in hosts)})",
        "job=$$",
        run.port("job"),
        *start_on_hosts(run, '"${slots[index]}"'),
    ]


def start_on_hosts(run: MachineCommand, workers: str) -> list[str]:
    """Bash that starts the command on every one of `hosts`, here or by ssh, and waits for all of them."""
    # By the name that the others know it by, not by the one it has for itself.
    own_name = ' --local-addr "$host"'
    command = run.torchrun("${#hosts[@]}", workers, "$job", '"${hosts[0]}"', own_name)
    settings = " ".join(["env", *run.exports()])
    look = run.look_for_data()
    return [
        f"folder={shlex.quote(run.folder)}",
        'remote_shell=${REMOTE_SHELL:-"ssh -n -tt -o BatchMode=yes"}',
        "# HOST WORD...: here or by ssh. It becomes that program, so it is called in a shell of its own.",
        "run_on() {",
        "  local host=$1",
        "  shift",
        '  case "$host" in',
        f'    {"|".join(LOCAL)}|"$HOSTNAME"|"${{HOSTNAME%%.*}}") cd "$folder" && exec "$@" ;;',
        """    *) exec $remote_shell "$host" "cd $(printf %q "$folder") && exec $(printf '%q ' "$@")" ;;""",
        "  esac",
        "}",
        *([f'for host in "${{hosts[@]}}"; do (run_on "$host" {look}); done'] if look else []),
        "pids=()",
        f"""trap 'kill "${{pids[@]}}" 2>/dev/null || true; echo "{AGAIN}" >&2' INT TERM""",
        'for index in "${!hosts[@]}"; do',
        "  host=${hosts[index]}",
        f'  run_on "$host" {settings} {command} &',
        "  pids+=($!)",
        "done",
        "status=0",
        'for pid in "${pids[@]}"; do wait "$pid" || status=$?; done',
        'exit "$status"',
    ]
