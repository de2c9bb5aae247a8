"""Warden: a small process that outlives a launcher which is killed, ends its workers and removes their folder.

A worker cannot do that for itself: it may be stopped, or still importing torch. The warden needs only the standard library, starts in
milliseconds and waits at a pipe. What comes is the numbers of started workers and then "done"; if the pipe ends without that word, the
launcher is dead.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

DONE = "done"


class Warden:
    """As a context: from its end on nobody is watched, and the folder is the launcher's own to remove."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-I", "-S", __file__, str(folder)]
        # A session of its own, so that Ctrl-C does not reach it.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def guard(self, process: subprocess.Popen[bytes]) -> None:
        """A process that leads a session, which ends with the launcher from here on."""
        self._say(str(process.pid))

    def __enter__(self) -> Warden:
        return self

    def __exit__(self, *raised: object) -> None:
        self._say(DONE)
        self.process.communicate()

    def _say(self, word: str) -> None:
        assert self.process.stdin is not None
        # It may have been killed: then nobody watches.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{word}\n")
            self.process.stdin.flush()


def main(folder: str, words: Iterable[str]) -> None:
    guarded: list[tuple[int, str]] = []
    for word in map(str.strip, words):
        if word == DONE:
            return
        guarded.append((int(word), began(int(word))))
    for pid, when in guarded:
        # The number may have become another process's.
        if when and began(pid) == when:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def began(pid: int) -> str:
    """When a process began, in the system's own count; empty if there is none, or no way to know."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "" if Path("/proc/self").exists() else "unknown"


if __name__ == "__main__":
    main(sys.argv[1], sys.stdin)
