"""Processes of one job on this machine: started together, waited for together, ended together.

They meet in a file and talk over the loopback, so that nobody outside the machine can reach them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

LOOK_S = 0.02
"""Between two looks at processes that run."""
PR_SET_PDEATHSIG = 1


def worker_environments(workers: int) -> list[dict[str, str]]:
    """What each of the workers of a job inherits: what torchrun would set but for an address, and a share of the cores.

    The user's own number of threads wins. The user's interface does not: this machine's workers need no other one.
    """
    shared = {"OMP_NUM_THREADS": str(max(1, count_cores() // workers)), **os.environ, **loopback()}
    return [
        shared
        | {
            "RANK": str(rank),
            "WORLD_SIZE": str(workers),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(workers),
        }
        for rank in range(workers)
    ]


def count_cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def loopback() -> dict[str, str]:
    """Keeps gloo and NCCL from listening anywhere else, and from asking for the machine's name."""
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


def start_process(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | int
) -> subprocess.Popen[bytes]:
    """In a session of its own, so that the children which it leaves behind can be ended too."""
    return subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output if output == subprocess.PIPE else subprocess.STDOUT,
        start_new_session=True,
    )


def wait_together(
    processes: Sequence[subprocess.Popen[bytes]],
    timeout_s: float | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> list[int | None]:
    """Wait until all have ended, one has failed, time is up, or it is cancelled; the exit codes, None of those that run."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        over = deadline is not None and time.monotonic() > deadline
        if None not in codes or any(codes) or over or cancelled():
            return codes
        time.sleep(LOOK_S)


def wait_for_rest(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until all have ended, however they do, but not longer."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(LOOK_S)


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a started process and the children that stayed in its session."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return


def stop_processes(processes: Sequence[subprocess.Popen[bytes]], grace_s: float) -> None:
    """Ask every process to end, wait `grace_s`, then kill what is left."""
    for process in processes:
        signal_group(process, signal.SIGTERM)
    wait_for_rest(processes, grace_s)
    for process in processes:
        signal_group(process, signal.SIGKILL)
    for process in processes:
        process.wait()


def signal_at_parents_end(number: int) -> None:
    """Have the kernel send this process a signal when the one that started it ends; only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
