"""Script: enter a network namespace, become the user, promise to die with the parent, become COMMAND.

Usage: enter.py NAMESPACE_FILE HOSTS_FILE PARENT_PID USER COMMAND...

USER is UID:GID, or - to stay who one is.

It is a program of its own, because code between fork and exec is not safe in a process with threads. It needs only the
standard library, because it must start in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import sys
from pathlib import Path

CLONE_NEWNET = 0x40000000
CLONE_NEWNS = 0x00020000
MS_BIND = 0x1000
MS_SLAVE_RECURSIVE = 0x80000 | 0x4000
PR_SET_PDEATHSIG = 1
EXIT_CANNOT_RUN = 126
EXIT_NOT_FOUND = 127


def main(namespace_file: str, hosts_file: str, parent: int, user: str, command: list[str]) -> int:
    """Replace this process by `command` inside the namespace; return only if that fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(namespace_file).open() as namespace:
        _check(libc.setns(namespace.fileno(), CLONE_NEWNET), "enter", namespace_file)
    if Path("/etc/hosts").exists():
        # In a mount namespace of its own, so that the lab's host names are known only here. Without
        # names torch looks every address up, fails and warns.
        _check(libc.unshare(CLONE_NEWNS), "make a mount namespace for", hosts_file)
        _check(libc.mount(b"none", b"/", None, MS_SLAVE_RECURSIVE, None), "unshare", "/")
        source = hosts_file.encode()
        _check(libc.mount(source, b"/etc/hosts", None, MS_BIND, None), "mount", hosts_file)
    if user != "-":
        become(*map(int, user.split(":")))
    # After that: the kernel drops the promise when a process becomes somebody else.
    die_with_parent()
    if os.getppid() != parent:  # it was killed before the promise was made
        return EXIT_CANNOT_RUN
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        print(f"{command[0]}: command not found", file=sys.stderr)
        return EXIT_NOT_FOUND
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return EXIT_CANNOT_RUN


def become(uid: int, gid: int) -> None:
    """Give up root for good, with the user's own groups."""
    try:
        name = pwd.getpwuid(uid).pw_name
        groups = os.getgrouplist(name, gid)
    except KeyError:
        groups = [gid]
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _check(status: int, action: str, subject: str) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), f"cannot {action}", subject)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5:]))
