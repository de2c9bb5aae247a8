"""One worker process: join the others, train every cell of the job in turn, hand over the results, leave.

`launch.py` starts `local_worker.py`, which calls `main` here. Its folder has the job, and the file in which the workers meet; results
go there. Where torchrun, or anything else that sets RANK and WORLD_SIZE, has started the command, the
command itself is the worker.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from thinwire.errors import ExchangeError, JobError, UsageError
from thinwire.recipes.assembly import make_trainer, note
from thinwire.recipes.checkpoints import Checkpoints, State
from thinwire.recipes.device import choose_device, prefer_determinism
from thinwire.recipes.examples import Data
from thinwire.recipes.job import Cell, Job, difference_but_steps, read_job
from thinwire.recipes.loop import Trainer
from thinwire.recipes.parallel import Workers, join
from thinwire.recipes.report import find_finished, save_row
from thinwire.recipes.tasks import Task
from thinwire.tools.files import write_text
from thinwire.tools.metrics import METRICS_FILE, MetricsLog, NoMetrics, Record
from thinwire.tools.results import Row
from thinwire.tools.trackers import TRACKERS
from thinwire.tools.traffic import Line, ledger_lines, write_lines

EXIT_FAILED = 1
EXIT_USAGE = 2


def work(
    job: Job, listener: Callable[[Record], None] | None = None, store: Path | None = None
) -> list[Row]:
    """Do this process's part of the job; returns when all processes have done theirs.

    They meet in the file `store`, or where their launcher says.
    """
    # Training ends here, and so does what the last steps held back: no news for the user.
    logging.getLogger("thinwire.handle").setLevel(logging.ERROR)
    device = choose_device(job.running)
    prefer_determinism(job.running.deterministic)
    task = job.choice.find()
    data = task.load(job.source)
    workers = join(job.running, device, store)
    # A folder that is named after the time has another name in every process.
    job = replace(job, out=Path(workers.gather(str(job.out))[0]))
    data = data.to(device)
    log = open_log(job, workers, listener)
    # The folder may be on the disk of process 0 only.
    finished = workers.gather(find_finished(job) if workers.process == 0 else None)[0]
    rows: list[Row] = []
    traffic: list[Line] = []
    for cell in job.cells():
        if cell.label in finished:
            rows.append(Row(**finished[cell.label]))
            continue
        row, lines = run_cell(job, cell, task, data, workers, log)
        rows.append(row)
        traffic += lines
        if workers.process == 0 and not job.evaluate:
            save_row(job, row, cell.about)
    log.close()
    if job.ledger is not None:
        everybodys = [line for lines in workers.gather(traffic) for line in lines]
        if workers.process == 0:
            write_lines(job.ledger, everybodys)
    return rows


def open_log(job: Job, workers: Workers, listener: Callable[[Record], None] | None) -> MetricsLog:
    if workers.process != 0 or job.evaluate:
        return NoMetrics()
    listeners = [] if listener is None else [listener]
    wanted = [kind for name, kind in TRACKERS.items() if getattr(job.running, name)]
    trackers = [kind(job.out, job.to_settings()) for kind in wanted]
    return MetricsLog(
        job.out / METRICS_FILE,
        [*listeners, *(tracker.show for tracker in trackers)],
        append=job.resume,
        on_close=[tracker.close for tracker in trackers],
    )


def run_cell(
    job: Job, cell: Cell, task: Task, data: Data, workers: Workers, log: MetricsLog
) -> tuple[Row, list[Line]]:
    """Train or only test one cell; returns its row and this process's traffic."""
    trainer = make_trainer(job, cell, task, data, workers, log)
    if job.resume:
        state = find_state(job, cell, trainer.checkpoints)
        if state is None:
            where = trainer.checkpoints.folder
            note(log, cell.label, f"there is no checkpoint in '{where}', so it starts anew")
        else:
            restore(trainer, state)
    row = trainer.evaluate() if job.evaluate else trainer.train()
    lines = [
        line
        for rank, ledger in trainer.replica.ledgers().items()
        for line in ledger_lines(cell.label, rank, ledger)
    ]
    trainer.replica.close()
    return row, lines


def find_state(job: Job, cell: Cell, checkpoints: Checkpoints) -> State | None:
    """Collective: where to go on, or what to test."""
    if not job.evaluate:
        return checkpoints.load_latest()
    state = checkpoints.load_best() or checkpoints.load_latest()
    if state is None:
        raise UsageError(
            f"out is '{job.out}', which has no checkpoint of {cell.label}; train with --checkpoint-every first"
        )
    return state


def restore(trainer: Trainer, state: State) -> None:
    difference = difference_but_steps(trainer.run.about, state["about"])
    if difference is not None:
        raise UsageError(
            f"{difference} in the checkpoint of {trainer.run.label}; resume with the same settings"
        )
    trainer.load_state_dict(state)


def wait_for_all() -> None:
    """Nobody closes a connection that a slower process still needs."""
    if dist.is_initialized():
        dist.barrier()


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
        "lost_contact": has_lost_contact(error),
        "sentence": describe_error(error),
        "traceback": traceback.format_exc(),
    }
    try:
        write_text(failure_file(folder, rank), json.dumps(content))
    except OSError:
        # Where the disk is full, a sentence may still fit.
        write_text(failure_file(folder, rank), json.dumps({**content, "traceback": ""}))


def describe_error(error: BaseException) -> str:
    """The error in one line; some are a sentence already."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, UsageError | JobError):
        return first_line
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def has_lost_contact(error: BaseException) -> bool:
    """Whether the error is about another worker. Torch has no class for that, and gloo has several words."""
    told = isinstance(error, ExchangeError | dist.DistError)
    return (
        told
        or re.search("exchange failed|timed? ?out|closed by peer", str(error), re.I) is not None
    )


def main(folder: Path) -> NoReturn:
    rank = int(os.environ["RANK"])
    try:
        rows = work(read_job(folder / "job.json"), store=folder / "store")
        hand_over(folder, rank, rows)
        wait_for_all()
    except BaseException as error:
        hand_over_failure(folder, rank, error)
        leave(EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED)
    leave(0)
