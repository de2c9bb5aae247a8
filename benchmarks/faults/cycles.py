"""Kill and resume: workers are killed at any moment, half of them while a checkpoint is written, and the run goes on.

The workers are forked from this process, which has imported everything, so that a cycle takes half a second.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from faults.bits import WORLD, compare, make_job, newest, reference, start_worker
from faults.kills import ended, partial_files, wait_until
from faults.parts import Tally
from faults.task import STEPS

GIVEN_UP_S = 15.0


def run(first: int, last: int, folder: Path) -> Iterator[Tally]:
    wanted = reference(folder)
    for number in range(first, last):
        yield cycle(number, folder, wanted)


def cycle(number: int, folder: Path, wanted: dict[str, str]) -> Tally:
    draw = random.Random(number)
    out, store = folder / "run", folder / "store"
    if newest(out) > STEPS - 60:
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    store.unlink(missing_ok=True)
    before, job = newest(out), make_job(out)
    pids = [start_worker(job, rank, store, out / f"log{rank}") for rank in range(WORLD)]
    wait_until(lambda: newest(out) > before or any(map(ended, pids)), 60)
    written = number % 2 == 0
    if written:
        # As close to the write as a look can be.
        deadline = time.monotonic() + 5
        while not (written := bool(partial_files(out))) and time.monotonic() < deadline:
            pass
    else:
        time.sleep(draw.uniform(0, 0.2))
    victims = [pids, pids[:1], pids[1:]][number % 3]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    rest = [pid for pid in pids if pid not in victims]
    # Those that lost a peer must notice by themselves.
    hang = not wait_until(lambda: all(map(ended, rest)), GIVEN_UP_S)
    torn = len(partial_files(out))
    for pid in pids:
        if not ended(pid):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return {
        "units": 1,
        "resumed": float(before > 0),
        "while writing": float(written),
        "files cut short": float(torn),
        "hangs": float(hang),
        **compare(out, wanted),
    }
