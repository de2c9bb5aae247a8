"""Places a cell can run in: a lab with shaped links, or plain processes on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import torch

from thinwire.bench.step_cell import ANY_RATE, StepCell, lab_rate
from thinwire.lab import Lab, LabSpec
from thinwire.lab.rerouting import BY_RELAY
from thinwire.tools.processes import (
    start_process,
    stop_processes,
    wait_together,
    worker_environments,
)
from thinwire.tools.warden import Warden

GRACE_S = 3.0
KEPT_CHARACTERS = 4000
TIME_UP = 124
"""The exit code that `timeout` has made customary."""
CANCELLED = 125
NO_FOLDER = "-"
"""In a worker's arguments: none was asked for."""
STORE_VARIABLE = "THINWIRE_STORE"
"""Names the file in which local workers meet; without it they meet where the launcher says."""


@dataclass(frozen=True)
class Attempt:
    """How the processes of one cell ended."""

    exit_code: int
    reason: str
    output: str
    """The last lines of the rank that ended worst."""


class Place(ABC):
    """Somewhere to start a cell's processes; a context manager."""

    name: str
    note = ""
    """What is to be known about rows that were measured there."""

    @abstractmethod
    def run(self, cell: StepCell, command: Sequence[str], timeout_s: float) -> Attempt:
        """Run `command` once per worker, in fresh processes, and wait for all of them."""

    def close(self) -> None:  # noqa: B027
        """Give back what the place holds."""

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class LabPlace(Place):
    """One host per worker, or per two of a sharded model. The lab stays for the next cell if that wants the same one and this one went well."""

    name = "lab"

    def __init__(self, mps: bool = False) -> None:
        self.mps = mps
        self._lab: Lab | None = None

    def run(self, cell: StepCell, command: Sequence[str], timeout_s: float) -> Attempt:
        lab = self._lab_for(cell)
        # Thinwire's own workers, which leave their rows in a folder of this process.
        result = lab.run(command, timeout_s=timeout_s, as_root=True)
        if result.exit_code != 0:
            # Processes killed in mid-kernel can leave a shared GPU's daemon unusable; the next cell gets a new one.
            self.close()
        own_end = [rank for rank in result.ranks if not rank.stopped] or list(result.ranks)
        worst = max(own_end, key=lambda rank: rank.exit_code)
        return Attempt(result.exit_code, result.reason, worst.output[-KEPT_CHARACTERS:])

    def _lab_for(self, cell: StepCell) -> Lab:
        on_gpu = cell.device == "cuda"
        spec = LabSpec(
            hosts=cell.workers // cell.per_host,
            ranks_per_host=cell.per_host,
            rate=lab_rate(cell),
            latency=cell.latency or "0ms",
            share_gpu=on_gpu,
            mps=self.mps and on_gpu,
        )
        if self._lab is not None and cell.rate == ANY_RATE:
            spec = replace(spec, rate=self._lab.spec.rate)
        if self._lab is None or self._lab.spec != spec:
            self.close()
            self._lab = Lab(spec).__enter__()
            self.note = BY_RELAY if self._lab.relayed else ""
        return self._lab

    def close(self) -> None:
        if self._lab is not None:
            lab, self._lab = self._lab, None
            lab.__exit__(None, None, None)


class LocalPlace(Place):
    """Plain processes that meet in a file and talk over the loopback."""

    name = "local"

    def run(self, cell: StepCell, command: Sequence[str], timeout_s: float) -> Attempt:
        environments = worker_environments(cell.workers)
        if cell.device == "cuda" and torch.cuda.device_count() < cell.workers:
            # NCCL refuses ranks that share a GPU on what it takes for one machine.
            for rank, environment in enumerate(environments):
                environment["NCCL_HOSTID"] = f"rank{rank}"
        with (
            tempfile.TemporaryDirectory(prefix="thinwire-step-") as folder,
            Warden(Path(folder)) as warden,
        ):
            for environment in environments:
                environment[STORE_VARIABLE] = str(Path(folder, "store"))
            return run_workers(command, environments, timeout_s, started=warden.guard)


def run_workers(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    timeout_s: float,
    first_rank: int = 0,
    cancelled: Callable[[], bool] = lambda: False,
    started: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> Attempt:
    """Start `command` once per environment; wait until all have ended, one has failed, time is up, or it is cancelled.

    `started` is told of every process.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in environments]
        stack.callback(lambda: stop_processes(processes, GRACE_S))
        for environment, file in zip(environments, files, strict=True):
            processes.append(start_process(command, environment, file))
            started(processes[-1])
        codes = wait_together(processes, timeout_s, cancelled)
        for index, code in enumerate(codes):
            if code:
                reason = f"rank {first_rank + index} ended with exit code {code}."
                return Attempt(code, reason, _tail(files[index]))
        if None not in codes:
            return Attempt(0, "", "")
        if cancelled():
            return Attempt(CANCELLED, "another rank failed.", "")
        return Attempt(TIME_UP, f"time was up after {timeout_s:g} s.", _tail(files[0]))


def _tail(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - KEPT_CHARACTERS))
    return file.read().decode(errors="replace")


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def why_no_lab() -> str | None:
    """Why rates cannot be had here, in one sentence; None if a lab can be tried."""
    if os.geteuid() != 0:
        return (
            "rates need root (they are links between network namespaces); measuring plain processes on this "
            "machine instead, whose links are not shaped."
        )
    return None


def trace_prefix(folder: Path, cell: StepCell) -> str:
    """Path of a cell's trace files without the rank: short, and unlike any other cell's."""
    parts = [cell.model.replace(":", "."), cell.method, cell.rate, f"{cell.workers}workers"]
    parts += [cell.device] if cell.device != "cpu" else []
    parts += [cell.amp] if cell.amp != "none" else []
    parts += [cell.parallel] if cell.parallel != "ddp" else []
    parts += [f"length{cell.length}"] if cell.length is not None else []
    parts += [f"bucket{cell.bucket_mb:g}"] if cell.bucket_mb is not None else []
    parts += [f"density{cell.density:g}"] if cell.density is not None else []
    parts += [f"rank{cell.rank}of"] if cell.rank is not None else []
    parts += [f"latency{cell.latency}"] if cell.latency is not None else []
    parts += [f"every{cell.every}"] if cell.every is not None else []
    return str(folder / "-".join([*parts, f"batch{cell.batch}"]))
