"""Processes inside network namespaces: start them there, find them, end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from thinwire.lab.accounts import Account
from thinwire.tools.processes import start_process

NAMESPACE_FOLDER = Path("/var/run/netns")
"""Where the kernel's users keep named namespaces, so that `ip netns` sees the lab's too."""

_ENTER = Path(__file__).with_name("enter.py")


def namespace_inode(name: str) -> int | None:
    """Return the inode of the namespace behind a name, None if the name does not exist."""
    try:
        return (NAMESPACE_FOLDER / name).stat().st_ino
    except FileNotFoundError:
        return None


def command_inside(
    namespace: str, hosts_file: Path, command: Sequence[str], account: Account | None = None
) -> list[str]:
    """What runs `command` inside a namespace, for a process of this one that starts it.

    It sees `hosts_file` as /etc/hosts, runs as `account` if one is given, and dies with this process.
    """
    enter = [sys.executable, "-I", "-S", str(_ENTER), str(NAMESPACE_FOLDER / namespace)]
    user = "-" if account is None else f"{account.uid}:{account.gid}"
    return [*enter, str(hosts_file), str(os.getpid()), user, *command]


def start_in_namespace(
    namespace: str,
    hosts_file: Path,
    command: Sequence[str],
    env: Mapping[str, str],
    account: Account | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` inside a namespace, in a session of its own, with its output in pipes."""
    entered = command_inside(namespace, hosts_file, command, account)
    return start_process(entered, env, subprocess.PIPE)


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
