"""Run one command once per rank, show what the ranks say, end them all when one fails."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TextIO

from thinwire.lab.accounts import Account
from thinwire.lab.processes import kill_inside, namespace_inode, start_in_namespace
from thinwire.lab.records import hosts_file
from thinwire.lab.topology import Rank, Topology
from thinwire.tools.processes import stop_processes, wait_together

EXIT_TIMEOUT = 124
GRACE_S = 3.0
"""How long a rank may take to end after it was asked to."""

KEPT_LINES = 10_000
"""Lines of output kept in memory per rank; all are shown."""

Echo = Callable[[str, TextIO], None]


@dataclass(frozen=True)
class RankResult:
    """How one rank ended."""

    rank: int
    host: str
    exit_code: int
    """128 + the signal's number where a signal ended it."""
    stopped: bool
    """True if the lab ended this rank, because another had failed or time was up."""
    output: str
    """Its last lines, standard output and standard error in the order they came."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the worst exit code, and why in one sentence if it is not 0."""

    exit_code: int
    reason: str
    ranks: tuple[RankResult, ...]
    seconds: float


class _Worker:
    """A started rank and the threads that read its output."""

    def __init__(self, rank: Rank, process: subprocess.Popen[bytes], label: str, echo: Echo):
        self.rank = rank
        self.process = process
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._label = label
        self._echo = echo
        assert process.stdout is not None and process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(process.stdout, sys.stdout), daemon=True),
            threading.Thread(target=self._read, args=(process.stderr, sys.stderr), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: IO[bytes], target: TextIO) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip("\r\n")
                self.lines.append(text)
                self._echo(f"{self._label} {text}", target)

    def finish_reading(self) -> None:
        """Wait for the rest of the output; a child that kept the pipe does not hold us up."""
        for reader in self._readers:
            reader.join(timeout=2)

    def result(self, stopped: bool) -> RankResult:
        """Return how the rank ended; the process must have ended."""
        code = self.process.returncode
        return RankResult(
            self.rank.rank,
            self.rank.host.name,
            128 - code if code < 0 else code,
            stopped,
            "".join(f"{line}\n" for line in self.lines),
        )


def run_ranks(
    topology: Topology,
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    timeout_s: float | None = None,
    echo: Echo | None = None,
    account: Account | None = None,
) -> Outcome:
    """Run `command` once per rank, as `account` if one is given, and wait for all of them.

    1. Start every rank inside its host's namespace.
    2. Wait until all have ended, one has failed, or time is up; then end the rest.
    3. Kill whatever the ranks left running inside the namespaces.
    """
    workers: list[_Worker] = []
    hosts = hosts_file(topology.name)
    started = time.monotonic()
    try:
        for rank, env in zip(topology.ranks(), environments, strict=True):
            process = start_in_namespace(rank.host.namespace, hosts, command, env, account)
            workers.append(_Worker(rank, process, _label(rank), echo or _silent))
        codes = wait_together([worker.process for worker in workers], timeout_s)
    finally:
        stop_processes([worker.process for worker in workers], GRACE_S)
        inodes = [namespace_inode(host.namespace) for host in topology.hosts]
        kill_inside([inode for inode in inodes if inode is not None])
        for worker in workers:
            worker.finish_reading()
    seconds = time.monotonic() - started
    pairs = zip(workers, codes, strict=True)
    results = tuple(worker.result(stopped=code is None) for worker, code in pairs)
    if None in codes and not any(codes):
        return Outcome(EXIT_TIMEOUT, f"time was up after {timeout_s:g} s.", results, seconds)
    worst = max((result for result in results if not result.stopped), key=lambda r: r.exit_code)
    return Outcome(worst.exit_code, _explain(worst), results, seconds)


def print_line(text: str, target: TextIO) -> None:
    """Print one line whole, so that the ranks' lines do not mix."""
    target.write(f"{text}\n")
    target.flush()


def _silent(text: str, target: TextIO) -> None:
    return None


def _label(rank: Rank) -> str:
    return f"[{rank.host.name} rank {rank.rank}]"


def _explain(worst: RankResult) -> str:
    if worst.exit_code == 0:
        return ""
    if worst.exit_code > 128:
        how = f"was ended by signal {worst.exit_code - 128}"
    else:
        how = f"failed with exit code {worst.exit_code}"
    return f"rank {worst.rank} on {worst.host} {how}; the other ranks were stopped."
