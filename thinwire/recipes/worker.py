"""One worker process: join the group, train with every method in turn, hand over the results, leave.

Started by `launch.py` as `python -m thinwire.recipes.worker JOB_FILE HAND_OVER_FOLDER`, or by the command itself when
torchrun (or anything else that sets RANK and WORLD_SIZE) has started it already.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from thinwire.errors import UsageError
from thinwire.methods.registry import METHODS, build_methods
from thinwire.observe.files import write_text
from thinwire.observe.ledger import Line, write_everybodys_lines
from thinwire.observe.metrics import MetricsLog, NoMetrics, Record
from thinwire.observe.results import Row
from thinwire.recipes.config import Job, read_job
from thinwire.recipes.loop import train
from thinwire.recipes.tasks import find_task

GROUP_TIMEOUT = timedelta(minutes=5)
EXIT_FAILED = 1
EXIT_USAGE = 2
METRICS_FILE = "metrics.jsonl"


def work(job: Job, listener: Callable[[Record], None] | None = None) -> list[Row]:
    """Do this rank's part of the job; returns when all ranks have done theirs."""
    # Training ends here, and so does what the last steps held back: no news for the user.
    logging.getLogger("thinwire.handle").setLevel(logging.ERROR)
    methods = build_methods(job.methods, job.options)
    task = find_task(job.task)
    data = task.load()
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    log = MetricsLog(job.out / METRICS_FILE, listener) if dist.get_rank() == 0 else NoMetrics()
    rows: list[Row] = []
    traffic: list[Line] = []
    for name, method in methods.items():
        lr = job.training.lr * METHODS[name].lr_scale
        rows.append(train(task, data, replace(job.training, lr=lr), name, method, log, traffic))
    log.close()
    if job.ledger is not None:
        write_everybodys_lines(job.ledger, traffic)
    return rows


def leave(code: int) -> NoReturn:
    """End the process without Python's shutdown, in which gloo's threads can abort."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


# -- handing over ----------------------------------------------------------------------------------------------


def result_file(folder: Path, rank: int) -> Path:
    return folder / f"result{rank}.json"


def failure_file(folder: Path, rank: int) -> Path:
    return folder / f"failure{rank}.json"


def hand_over(folder: Path, rank: int, rows: list[Row]) -> None:
    write_text(result_file(folder, rank), json.dumps([row.to_dict() for row in rows]))


def hand_over_failure(folder: Path, rank: int, error: BaseException) -> None:
    content = {
        "rank": rank,
        "time": time.time(),
        "usage": isinstance(error, UsageError),
        "sentence": describe_error(error),
        "traceback": traceback.format_exc(),
    }
    write_text(failure_file(folder, rank), json.dumps(content))


def describe_error(error: BaseException) -> str:
    """The error in one line; a usage error is a sentence already."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, UsageError):
        return first_line
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def main(job_file: str, folder: str) -> NoReturn:
    rank = int(os.environ["RANK"])
    try:
        rows = work(read_job(Path(job_file)))
        hand_over(Path(folder), rank, rows)
        # Nobody closes a connection that a slower rank still needs.
        dist.barrier()
    except BaseException as error:
        hand_over_failure(Path(folder), rank, error)
        leave(EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED)
    leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
