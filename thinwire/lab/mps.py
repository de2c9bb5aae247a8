"""NVIDIA's multi-process service, so that ranks which share a GPU run on it at the same time."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

from thinwire.errors import UsageError
from thinwire.lab.records import Record, is_own, process_start, run_directory

CONTROL = "nvidia-cuda-mps-control"

_PID_FILE = f"{CONTROL}.pid"


def start_mps(record: Record) -> None:
    """Start a daemon with folders of its own, so that one the user runs already is left alone."""
    if shutil.which(CONTROL) is None:
        raise UsageError(
            f"mps is asked for, but {CONTROL} is not on the PATH; without it ranks take turns on a "
            "shared GPU, which works but is slower."
        )
    folder = _folder_of(record)
    record.mps_directory = str(folder)
    record.save()
    for name in ("pipe", "log"):
        (folder / name).mkdir(parents=True)
    started = subprocess.run(
        [CONTROL, "-d"], env=_environment(folder), capture_output=True, text=True, timeout=30
    )
    if started.returncode != 0:
        reason = (started.stderr or started.stdout).strip() or f"exit code {started.returncode}"
        raise UsageError(f"mps is asked for, but {CONTROL} did not start: {reason}")


def mps_environment(record: Record) -> dict[str, str]:
    """Return the variables that lead a rank to the lab's daemon; empty without one."""
    if record.mps_directory is None:
        return {}
    folder = Path(record.mps_directory)
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }


def stop_mps(record: Record) -> None:
    """Stop the record's daemon, by force if it does not answer, and remove its folders.

    1. Ask it to quit through its pipe.
    2. Wait for the process named in its pid file; kill it after five seconds.
    """
    if record.mps_directory is None:
        return
    folder = _folder_of(record)
    if not folder.exists():
        record.mps_directory = None
        return
    if record.mps_directory != str(folder) or not is_own(folder, stat.S_ISDIR):
        raise UsageError(
            f'the folder "{record.mps_directory}" was not created by lab {record.name}: remove it by hand and then '
            f"the record {record.path}."
        )
    pid = _daemon_pid(folder)
    if pid is not None and shutil.which(CONTROL) is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed below
            subprocess.run(
                [CONTROL], input=b"quit\n", env=_environment(folder), capture_output=True, timeout=5
            )
    if pid is not None:
        _wait_or_kill(pid)
    shutil.rmtree(folder, ignore_errors=True)
    record.mps_directory = None


def _folder_of(record: Record) -> Path:
    return run_directory() / f"{record.name}-mps"


def _environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }


def _daemon_pid(folder: Path) -> int | None:
    """The process that its own file names; a file that somebody else has put there is not believed."""
    file = folder / "pipe" / _PID_FILE
    try:
        return int(file.read_text().strip()) if is_own(file, stat.S_ISREG) else None
    except (OSError, ValueError):
        return None


def _wait_or_kill(pid: int) -> None:
    started = process_start(pid)
    deadline = time.monotonic() + 5
    while started is not None and process_start(pid) == started:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)
