"""Launch: local worker processes, results by file.

1. write the job to a file in a scratch folder of this user's own, in which the workers also meet;
2. start `workers` processes and watch them: when one fails, all end; a warden ends them if this process is killed;
3. meanwhile follow metrics.jsonl and show it;
4. judge by the result files as well as by the exit codes: a worker that handed over everything did its work, and an
   exit code of 0 without a result is a failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from thinwire.errors import JobError, UsageError
from thinwire.recipes.config import Running
from thinwire.recipes.job import Job, write_job
from thinwire.recipes.links import seats
from thinwire.recipes.worker import failure_file, result_file
from thinwire.tools.files import write_text
from thinwire.tools.metrics import METRICS_FILE, Record, Tail
from thinwire.tools.processes import (
    start_process,
    stop_processes,
    wait_for_rest,
    wait_together,
)
from thinwire.tools.results import Row
from thinwire.tools.signals import signals_as_exceptions
from thinwire.tools.warden import Warden

GRACE_S = 2.0
"""How long the others have to say what they saw when a worker has failed, and to end when they are asked to."""
FOLLOW_SECONDS = 0.2


def launch(job: Job, listener: Callable[[Record], None]) -> list[Row]:
    """Run the job with local workers and return rank 0's rows; JobError if a worker failed."""
    with signals_as_exceptions(), tempfile.TemporaryDirectory(prefix="thinwire-") as scratch:
        folder = Path(scratch)
        write_job(folder / "job.json", job)
        with following(job.out / METRICS_FILE, listener):
            codes = run_workers(job.running, folder)
        return collect_rows(job, folder, codes)


def run_workers(running: Running, folder: Path) -> list[int | None]:
    """Start the workers and wait for them; the exit code of each, None of one that had to be ended."""
    command = [sys.executable, "-m", "thinwire.recipes.local_worker", str(folder), str(os.getpid())]
    processes: list[subprocess.Popen[bytes]] = []
    with seats(running, command) as places, Warden(folder) as warden:
        try:
            for rank, (words, environment) in enumerate(places):
                with log_file(folder, rank).open("wb") as log:
                    processes.append(start_process(words, environment, log))
                warden.guard(processes[-1])
            wait_together(processes)
            wait_for_rest(processes, GRACE_S)
            return [process.poll() for process in processes]
        finally:
            stop_processes(processes, GRACE_S)


def log_file(folder: Path, rank: int) -> Path:
    return folder / f"worker{rank}.log"


def collect_rows(job: Job, folder: Path, codes: Sequence[int | None]) -> list[Row]:
    """The rows if every worker handed them over, else the error of the one that failed first."""
    missing = [rank for rank in range(len(codes)) if not result_file(folder, rank).exists()]
    if not missing:
        rows = json.loads(result_file(folder, 0).read_text())
        return [Row(**row) for row in rows]
    reports: list[dict[str, Any]] = [
        json.loads(failure_file(folder, rank).read_text())
        for rank in missing
        if failure_file(folder, rank).exists()
    ]
    # A worker that was killed leaves no report, and those of its peers only say that it is gone.
    unsaid = [rank for rank in missing if not failure_file(folder, rank).exists()]
    killed = [rank for rank in unsaid if codes[rank] is not None]
    silent = [rank for rank in unsaid if codes[rank] is None]
    first = min(reports, key=lambda report: report["time"], default=None)
    if killed or first is None:
        rank = (killed or missing)[0]
        raise failed_job(job, rank, describe_exit(codes[rank]), read_log(folder, rank))
    if first["usage"]:
        raise UsageError(first["sentence"])
    if silent and first["lost_contact"]:
        how = f"gave no answer for {job.running.timeout:g} s"
        raise failed_job(job, silent[0], how, read_log(folder, silent[0]) or first["traceback"])
    raise failed_job(job, first["rank"], f"failed: {first['sentence']}", first["traceback"])


def failed_job(job: Job, rank: int, how: str, trace: str) -> JobError:
    path = job.out / f"worker{rank}-error.txt"
    try:
        write_text(path, trace)
        where = f" (its last words are in {path})"
    except OSError:
        # The disk may be full: that may even be why it failed.
        where = ""
    return JobError(f"worker {rank} of {job.running.processes} {how}{where}")


def describe_exit(code: int | None) -> str:
    if code is None:
        return "left no result"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code} and no result"


def read_log(folder: Path, rank: int) -> str:
    log = log_file(folder, rank)
    return log.read_text(errors="replace") if log.exists() else ""


@contextlib.contextmanager
def following(path: Path, listener: Callable[[Record], None]) -> Iterator[None]:
    """Show the listener every record of a growing file, in a thread, until the block ends."""
    # What is there already belongs to an earlier part of the job.
    tail, done = Tail(path, at_end=True), threading.Event()

    def follow() -> None:
        while not done.wait(FOLLOW_SECONDS):
            for record in tail.new_records():
                listener(record)

    thread = threading.Thread(target=follow, name="thinwire-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        for record in tail.new_records():
            listener(record)
