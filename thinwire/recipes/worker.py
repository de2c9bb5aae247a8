"""One worker process: join the others, train every cell of the job in turn, hand over the results, leave.

Started by `launch.py` as `python -m thinwire.recipes.worker JOB_FILE HAND_OVER_FOLDER LAUNCHER_PID`, or by the
command itself when torchrun (or anything else that sets RANK and WORLD_SIZE) has started it already.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from thinwire.errors import UsageError
from thinwire.observe.files import write_text
from thinwire.observe.ledger import Line, ledger_lines, write_lines
from thinwire.observe.metrics import METRICS_FILE, MetricsLog, NoMetrics, Record
from thinwire.observe.results import Row
from thinwire.recipes.assembly import make_trainer
from thinwire.recipes.checkpoints import Checkpoints, State
from thinwire.recipes.device import choose_device, prefer_determinism
from thinwire.recipes.examples import Data
from thinwire.recipes.job import Cell, Job, difference_but_steps, read_job
from thinwire.recipes.loop import Trainer
from thinwire.recipes.parallel import Workers, join
from thinwire.recipes.report import find_finished, save_row
from thinwire.recipes.tasks import Task

EXIT_FAILED = 1
EXIT_USAGE = 2
WATCH_SECONDS = 1.0


def work(job: Job, listener: Callable[[Record], None] | None = None) -> list[Row]:
    """Do this process's part of the job; returns when all processes have done theirs."""
    # Training ends here, and so does what the last steps held back: no news for the user.
    logging.getLogger("thinwire.handle").setLevel(logging.ERROR)
    device = choose_device(job.running)
    prefer_determinism(job.running.deterministic)
    task = job.choice.find()
    data = task.load(job.source)
    workers = join(job.running, device)
    # A folder that is named after the time has another name in every process.
    job = replace(job, out=Path(workers.gather(str(job.out))[0]))
    data = Data(data.kind, data.train.to(device), data.test.to(device))
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
    if job.running.tensorboard:
        from thinwire.observe.tensorboard import TensorBoard

        listeners.append(TensorBoard(job.out / "tensorboard").show)
    return MetricsLog(job.out / METRICS_FILE, listeners, append=job.resume)


def run_cell(
    job: Job, cell: Cell, task: Task, data: Data, workers: Workers, log: MetricsLog
) -> tuple[Row, list[Line]]:
    """Train or only test one cell; returns its row and this process's traffic."""
    trainer = make_trainer(job, cell, task, data, workers, log)
    if job.resume:
        restore(trainer, find_state(job, cell, trainer.checkpoints))
    row = trainer.judge() if job.evaluate else trainer.train()
    lines = [
        line
        for rank, ledger in trainer.replica.ledgers().items()
        for line in ledger_lines(cell.label, rank, ledger)
    ]
    trainer.replica.close()
    return row, lines


def find_state(job: Job, cell: Cell, checkpoints: Checkpoints) -> State | None:
    """Collective: where to go on, or what to judge."""
    if not job.evaluate:
        return checkpoints.load_latest()
    state = checkpoints.load_best() or checkpoints.load_latest()
    if state is None:
        raise UsageError(
            f"out is '{job.out}', which has no checkpoint of {cell.label}; train with --checkpoint-every first"
        )
    return state


def restore(trainer: Trainer, state: State | None) -> None:
    if state is None:
        return
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


def end_with(launcher: int, folder: Path) -> None:
    """End this process soon after its launcher: one that was killed cannot, and a resumed run must have the folder alone."""

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(WATCH_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(EXIT_FAILED)

    threading.Thread(target=watch, name="thinwire-launcher", daemon=True).start()


def main(job_file: str, folder: str, launcher: str) -> NoReturn:
    end_with(int(launcher), Path(folder))
    rank = int(os.environ["RANK"])
    try:
        rows = work(read_job(Path(job_file)))
        hand_over(Path(folder), rank, rows)
        wait_for_all()
    except BaseException as error:
        hand_over_failure(Path(folder), rank, error)
        leave(EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED)
    leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
