"""Launch: local worker processes through torch's elastic launcher, results by file.

1. write the job to a file in a scratch folder;
2. let torch's agent start `workers` processes and watch them (it ends all when one fails);
3. meanwhile follow metrics.jsonl and show it;
4. judge by the result files as well as by the exit codes: a worker that handed over everything did its work, and an
   exit code of 0 without a result is a failure.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from thinwire.errors import JobError, UsageError
from thinwire.observe.files import write_text
from thinwire.observe.metrics import METRICS_FILE, Record, Tail
from thinwire.observe.provenance import count_cores
from thinwire.observe.results import Row
from thinwire.recipes.job import Job, write_job
from thinwire.recipes.worker import failure_file, result_file

SHUTDOWN_SECONDS = 2
FOLLOW_SECONDS = 0.2


def launch(job: Job, listener: Callable[[Record], None]) -> list[Row]:
    """Run the job with local workers and return rank 0's rows; JobError if a worker failed."""
    with tempfile.TemporaryDirectory(prefix="thinwire-") as scratch:
        folder = Path(scratch)
        write_job(folder / "job.json", job)
        with following(job.out / METRICS_FILE, listener):
            failures = run_agent(job.running.processes, folder)
        return judge(job, folder, failures)


def run_agent(workers: int, folder: Path) -> dict[int, ProcessFailure]:
    """Start the workers and wait for them; returns the ranks that torch's agent saw fail."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        # By default torch asks the name service for this machine, which may not know it.
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL),
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    job_file, launcher = str(folder / "job.json"), str(os.getpid())
    command = ["-m", "thinwire.recipes.worker", job_file, str(folder), launcher]
    with worker_environment(workers), quiet_agent(), same_signal_handlers():
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            return dict(error.failures)
        except SignalException as error:
            raise KeyboardInterrupt(str(error)) from None
    return {}


def judge(job: Job, folder: Path, failures: dict[int, ProcessFailure]) -> list[Row]:
    """The rows if every worker handed them over, else the error of the one that failed first."""
    missing = [r for r in range(job.running.processes) if not result_file(folder, r).exists()]
    if not missing:
        rows = json.loads(result_file(folder, 0).read_text())
        return [Row(**row) for row in rows]
    reports: list[dict[str, Any]] = [
        json.loads(failure_file(folder, rank).read_text())
        for rank in missing
        if failure_file(folder, rank).exists()
    ]
    # A worker that was killed leaves no report, and those of its peers only say that it is gone.
    silent = [r for r in missing if r in failures and not failure_file(folder, r).exists()]
    killed = [r for r in silent if failures[r].exitcode != -signal.SIGTERM]
    if reports and not killed:
        first = min(reports, key=lambda report: report["time"])
        if first["usage"]:
            raise UsageError(first["sentence"])
        raise failed_job(job, first["rank"], f"failed: {first['sentence']}", first["traceback"])
    rank = killed[0] if killed else missing[0]
    how = describe_exit(failures[rank].exitcode) if rank in failures else "left no result"
    raise failed_job(job, rank, how, read_logs(folder, rank))


def failed_job(job: Job, rank: int, how: str, trace: str) -> JobError:
    path = job.out / f"worker{rank}-error.txt"
    write_text(path, trace)
    return JobError(
        f"worker {rank} of {job.running.processes} {how} (its last words are in {path})"
    )


def describe_exit(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code} and no result"


def read_logs(folder: Path, rank: int) -> str:
    logs = sorted((folder / "logs").glob(f"*/attempt_*/{rank}/std*.log"))
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in logs)


# -- around the agent ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def worker_environment(workers: int) -> Iterator[None]:
    """What workers inherit; the user's own settings win.

    The workers share this machine's cores, and gloo must not look for the machine's name.
    """
    wanted = {"OMP_NUM_THREADS": str(max(1, count_cores() // workers))}
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        wanted["GLOO_SOCKET_IFNAME"] = loopback
    added = {key: value for key, value in wanted.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            del os.environ[key]


@contextlib.contextmanager
def quiet_agent() -> Iterator[None]:
    """Torch's agent reports failures at length on stderr; `judge` says it in one sentence.

    Its many loggers each have a level and a handler of their own, and nothing else runs here meanwhile.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def same_signal_handlers() -> Iterator[None]:
    """Torch's agent replaces signal handlers and leaves its own behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kinds = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {kind: signal.getsignal(kind) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


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
