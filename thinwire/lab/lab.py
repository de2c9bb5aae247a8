"""Lab: the emulated cluster as a context manager, and the cleaning of labs whose owner died."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from thinwire.errors import UsageError
from thinwire.lab.counters import Traffic, read_traffic
from thinwire.lab.environment import rank_environment, visible_gpus
from thinwire.lab.mps import mps_environment, start_mps, stop_mps
from thinwire.lab.network import create_network, destroy_network, require_privileges
from thinwire.lab.records import Record, hosts_file, load_records
from thinwire.lab.runner import Echo, Outcome, RankResult, run_ranks
from thinwire.lab.signals import signals_as_exceptions, signals_held
from thinwire.lab.topology import LabSpec, Topology, plan_topology

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
    SIGTERM; `clean()` removes what a killed process left.
    """

    def __init__(self, spec: LabSpec) -> None:
        self.spec = spec
        self.topology: Topology
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
            create_network(self.topology, self._record)
            self._stack = building.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() == self._record.owner:  # not in a child that was forked inside the block
            self._stack.close()

    @property
    def name(self) -> str:
        """The prefix of every name this lab created."""
        return self.topology.name

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
    ) -> RunResult:
        """Run `command` once per rank and return exit codes, output and traffic.

        `env` adds to this process's environment, under the lab's own variables. `echo(line, stream)`
        is called with every line of output as it comes; without it output is only collected.
        """
        check_command(command)
        base = {**os.environ, **(env or {})}
        gpus = visible_gpus(base)
        port = FIRST_PORT + self._runs
        self._runs += 1
        environments = [
            rank_environment(self.topology, rank, port, gpus, base) | mps_environment(self._record)
            for rank in self.topology.ranks()
        ]
        before = self.traffic()
        outcome: Outcome = run_ranks(self.topology, command, environments, timeout_s, echo)
        return RunResult(
            outcome.exit_code,
            outcome.reason,
            outcome.ranks,
            self.traffic() - before,
            outcome.seconds,
        )


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
