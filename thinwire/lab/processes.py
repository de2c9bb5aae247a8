"""Processes inside network namespaces: start them there, find them, end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

NAMESPACE_FOLDER = Path("/var/run/netns")
"""Where the kernel's users keep named namespaces, so that `ip netns` sees the lab's too."""

_ENTER = Path(__file__).with_name("enter.py")


def namespace_inode(name: str) -> int | None:
    """Return the inode of the namespace behind a name, None if the name does not exist."""
    try:
        return (NAMESPACE_FOLDER / name).stat().st_ino
    except FileNotFoundError:
        return None


def start_in_namespace(
    namespace: str,
    hosts_file: Path,
    command: Sequence[str],
    env: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """Start `command` inside a namespace, in a session of its own, with its output in pipes.

    It sees `hosts_file` as /etc/hosts, and it dies with this process.
    """
    enter = [sys.executable, "-I", "-S", str(_ENTER), str(NAMESPACE_FOLDER / namespace)]
    return subprocess.Popen(
        [*enter, str(hosts_file), str(os.getpid()), *command],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


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
    deadline = time.monotonic() + grace_s
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in processes:
        signal_group(process, signal.SIGKILL)
    for process in processes:
        process.wait()


def kill_inside(inodes: Collection[int], wait_s: float = 5.0) -> None:
    """Kill every process whose network namespace is one of `inodes` and wait until they are gone.

    A rank's children may have left its session, but they cannot have left its namespace unnoticed.
    """
    deadline = time.monotonic() + wait_s
    while pids := pids_inside(inodes):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def pids_inside(inodes: Collection[int]) -> list[int]:
    """Return the processes, other than this one, whose network namespace is one of `inodes`."""
    wanted = set(inodes)
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            inode = (folder / "ns" / "net").stat().st_ino
        except OSError:  # it ended in between, or it is a zombie
            continue
        if inode in wanted:
            found.append(int(folder.name))
    return found
