"""Lab: the emulated cluster as a context manager, and the cleaning of labs whose owner died."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import UsageError
from thinwire.lab.accounts import invoking_user
from thinwire.lab.counters import Traffic, read_traffic
from thinwire.lab.environment import rank_environment, visible_gpus
from thinwire.lab.mps import mps_environment, start_mps, stop_mps
from thinwire.lab.network import change_rate, create_network, destroy_network, require_privileges
from thinwire.lab.processes import command_inside
from thinwire.lab.rates import parse_rate
from thinwire.lab.records import Record, hosts_file, load_records
from thinwire.lab.rerouting import start_relay
from thinwire.lab.runner import Echo, Outcome, RankResult, run_ranks
from thinwire.lab.topology import LabSpec, Topology, plan_topology
from thinwire.tools.processes import stop_processes
from thinwire.tools.signals import signals_as_exceptions, signals_held

FIRST_PORT = 29500
"""torch's usual rendezvous port; each run in a lab takes the next, the last may be in TIME_WAIT."""


@dataclass(frozen=True)
class RunResult:
    """What one command did in the lab."""

    exit_code: int
    """0, or the worst exit code of the ranks that ended by themselves (124 if time was up)."""
    reason: str
    """Why the exit code is not 0, in one sentence."""
    ranks: tuple[RankResult, ...]
    traffic: Traffic
    """What crossed each host's interface while the command ran."""
    seconds: float


class Lab:
    """Emulated hosts on this machine, from `with` until its end.

    `with Lab(LabSpec(hosts=2, rate="1gbit")) as lab: result = lab.run(["python", "train.py"])`

    Everything the lab creates is removed at the end of the block, also after an error, Ctrl-C or
    SIGTERM. `clean()` removes what a killed process left.
    """

    def __init__(self, spec: LabSpec) -> None:
        self.spec = spec
        self.topology: Topology
        self.relayed = False
        """Whether a program delays the packets, because the kernel cannot."""
        self._record: Record
        self._stack = ExitStack()
        self._runs = 0

    def __enter__(self) -> Lab:
        require_privileges()
        with ExitStack() as building:
            building.enter_context(signals_as_exceptions())
            self.topology, self._record = _reserve(self.spec)
            building.callback(_destroy, self._record)
            if self.spec.mps:
                start_mps(self._record)
            _write_hosts(self.topology)
            self.relayed = create_network(self.topology, self._record)
            if self.relayed:
                relay = start_relay(self.topology, hosts_file(self.topology.name))
                building.callback(stop_processes, [relay], 0.0)
            self._stack = building.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        if os.getpid() == self._record.owner:  # not in a child that was forked inside the block
            self._stack.close()

    @property
    def name(self) -> str:
        """The prefix of every name this lab created."""
        return self.topology.name

    def change_rate(self, rate: str) -> None:
        """Give all links that are shaped another rate, while a command runs on them."""
        bits = parse_rate(rate)
        if bits is None or None in self.spec.rates:
            raise UsageError(f"rate is {rate!r}; only links with a rate can be given another one")
        change_rate(self.topology, bits)

    def traffic(self) -> Traffic:
        """Return the counters of every host since the lab was built."""
        return read_traffic(self.topology)

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        echo: Echo | None = None,
        as_root: bool = False,
    ) -> RunResult:
        """Run `command` once per rank and return exit codes, output and traffic.

        Under sudo it runs as the user who called that, unless `as_root`. `env` adds to this process's environment, under the lab's own variables. `echo(line, stream)`
        is called with every line of output as it comes; without it output is only collected.
        """
        check_command(command)
        account = None if as_root else invoking_user()
        own = {} if account is None else account.environment
        environments = self._environments({**os.environ, **own, **(env or {})})
        before = self.traffic()
        outcome: Outcome = run_ranks(self.topology, command, environments, timeout_s, echo, account)
        return RunResult(
            outcome.exit_code,
            outcome.reason,
            outcome.ranks,
            self.traffic() - before,
            outcome.seconds,
        )

    def seats(self, command: Sequence[str]) -> list[tuple[list[str], dict[str, str]]]:
        """For a launcher of its own: what to start for each rank, and with which environment, so that `command` runs on its host.

        The launcher must be this process; it ends what it started before the lab does.
        """
        hosts = hosts_file(self.topology.name)
        commands = [
            command_inside(rank.host.namespace, hosts, command) for rank in self.topology.ranks()
        ]
        return list(zip(commands, self._environments(os.environ), strict=True))

    def _environments(self, base: Mapping[str, str]) -> list[dict[str, str]]:
        """One per rank; each call is for another run."""
        gpus = visible_gpus(base)
        port = FIRST_PORT + self._runs
        self._runs += 1
        return [
            rank_environment(self.topology, rank, port, gpus, base) | mps_environment(self._record)
            for rank in self.topology.ranks()
        ]


def why_no_lab(spec: LabSpec) -> str:
    """Why such a lab cannot be built here, in one sentence; empty if it can. It is built to find out, and removed."""
    try:
        with Lab(spec):
            return ""
    except UsageError as refusal:
        return str(refusal)


def check_command(command: Sequence[str]) -> None:
    """Raise UsageError unless the command names a program that can be found."""
    if not command:
        raise UsageError("the command is empty; write it after --, as in `-- python train.py`.")
    if shutil.which(command[0]) is None:
        raise UsageError(
            f'the command "{command[0]}" is not a program on the PATH or a path to one.'
        )


def clean(names: Sequence[str] = ()) -> list[str]:
    """Remove what labs left whose owner died, all of them or those named; return their names.

    Raises UsageError for a name that is no lab's, or whose owner still runs.
    """
    chosen = find_remains(names)
    refusals = []
    for record in chosen:
        try:
            _destroy(record)
        except UsageError as refusal:  # the other labs are still to be cleaned
            refusals.append(refusal)
    if refusals:
        raise refusals[0]
    return [record.name for record in chosen]


def find_remains(names: Sequence[str] = ()) -> list[Record]:
    """What `clean` would remove."""
    require_privileges()
    records = {record.name: record for record in load_records()}
    for name in names:
        if name not in records:
            known = ", ".join(records) or "none"
            raise UsageError(
                f'"{name}" is not a lab that thinwire created here; known labs: {known}.'
            )
        if records[name].owner_alive:
            raise UsageError(
                f'lab "{name}" is in use by process {records[name].owner}; end that process instead.'
            )
    dead = [record for record in records.values() if not record.owner_alive]
    return [record for record in dead if not names or record.name in names]


def _reserve(spec: LabSpec) -> tuple[Topology, Record]:
    while True:
        others = load_records()
        topology = plan_topology(
            spec, {other.name for other in others}, {other.network for other in others}
        )
        try:
            return topology, Record.open(topology.name, topology.network)
        except FileExistsError:  # another lab drew the same name in the same moment
            continue


def _write_hosts(topology: Topology) -> None:
    """Write the machine's host names and the lab's for the processes of the lab."""
    machine = Path("/etc/hosts")
    lines = machine.read_text().splitlines() if machine.exists() else []
    for host in topology.hosts:
        # torch listens on IPv6 sockets and looks up IPv4 peers in their mapped form.
        lines += [f"{host.address}\t{host.name}", f"::ffff:{host.address}\t{host.name}"]
    hosts_file(topology.name).write_text("\n".join(lines) + "\n")


def _destroy(record: Record) -> None:
    """Remove everything a record holds, then the record; a second Ctrl-C waits until it is done."""
    with signals_held():
        destroy_network(record)
        stop_mps(record)
        record.close()
