"""Kills of the real command: `thinwire train` in mid-flight, its launcher or a worker, by every signal that people use.

What is checked after each: nothing runs any more, the scratch folder is gone, the user is told in one sentence, and what lies in the
run folder has the bits of a job that nobody disturbed. The next kill is of the same run, resumed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from faults.bits import LABEL, WORLD, checkpoint_folder, compare, newest, reference
from faults.groups import fork
from faults.parts import Tally
from faults.task import DELAY, MARK, STEPS, started_file
from thinwire.cli import main

TIMEOUT_S = 20
"""After which a stopped worker is given up; on a busy machine two workers start seconds apart."""
START_S = 300.0
"""How long a job may take to start on a busy machine."""
STARTS = 5
"""How often one is tried."""
LIMITS_S = {
    "launcher killed": 2.0,
    "launcher killed, worker stopped": 2.0,
    "worker stopped": TIMEOUT_S + 15.0,
}
"""How long processes may live on; 10 s where nothing is said. A stopped worker is missed by the others, who must have started:
their time begins then."""
HARMS = (
    "launcher killed", "worker killed", "launcher terminated", "launcher interrupted", "launcher killed",
    "worker killed", "launcher killed, worker stopped", "worker terminated", "launcher killed", "worker stopped",
)  # fmt: skip


def run(first: int, last: int, folder: Path) -> Iterator[Tally]:
    wanted = reference(folder)
    for number in range(first, last):
        yield kill(number, folder, wanted)


def kill(number: int, folder: Path, wanted: dict[str, str]) -> Tally:
    draw = random.Random(number)
    harm, out = HARMS[number % len(HARMS)], folder / "run"
    scratch, log = folder / "scratch", folder / "log"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    log.unlink(missing_ok=True)
    if newest(out) > STEPS - 40:
        shutil.rmtree(out)
    before = newest(out)
    # One kill in five hits a job that is still starting, with each harm in turn.
    if number % 5 == number // 10 % 5:
        launcher = fork(lambda: launch(out, scratch), log)
        time.sleep(draw.uniform(0.2, 4.0))
    else:
        launcher = start_training(out, scratch, log, before)
        time.sleep(draw.uniform(0, 0.5))
    workers = [pid for pid in marked(scratch) if is_worker(pid)]
    victim = draw.choice(workers) if workers else None
    do(harm, launcher, victim)
    if harm == "worker stopped":
        wait_until(lambda: ended(launcher) or others_started(scratch, victim), START_S)
    began = time.monotonic()
    left = not wait_until(lambda: ended(launcher) and not marked(scratch), LIMITS_S.get(harm, 10.0))
    seconds = time.monotonic() - began
    survivors = marked(scratch)
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    if not ended(launcher):
        os.kill(launcher, signal.SIGKILL)
        os.waitpid(launcher, 0)
    # Torch has a folder of its own there, which it keeps.
    folders = partial(scratch.glob, "thinwire-*")
    wait_until(lambda: not list(folders()), 1)
    words = log.read_text() if log.exists() else ""
    return {
        "units": 1,
        harm: 1,
        "resumed": float(before > 0),
        "hangs": float(left),
        "leftovers": float(len(survivors) + len(list(folders()))),
        "tracebacks shown": float("Traceback" in words),
        f"slowest end in s, {harm}": round(seconds, 2),
        **compare(out, wanted),
    }


def start_training(out: Path, scratch: Path, log: Path, before: int) -> int:
    """The launcher of a job that has saved a step. On a busy machine its workers may have missed each other: then another one."""
    for _ in range(STARTS):
        launcher = fork(lambda: launch(out, scratch), log)
        wait_until(lambda pid=launcher: newest(out) > before or ended(pid), START_S)
        if newest(out) > before:
            return launcher
    raise RuntimeError(f"a job that nobody harmed did not start: {log.read_text()}")


def launch(out: Path, scratch: Path) -> int:
    """In the forked process: what a user types."""
    # A campaign in a shell's background does not hear it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= {"TMPDIR": str(scratch), MARK: str(scratch), DELAY: "0.02"}
    words = (
        f"train faults.task:TASK --method {LABEL} --density 0.1 --workers {WORLD} --steps {STEPS}"
    )
    words += f" --checkpoint-every 1 --deterministic --device cpu --timeout {TIMEOUT_S} --resume"
    return main([*words.split(), "--set", "method.dense_fallback=false", "--out", str(out)])


def do(harm: str, launcher: int, victim: int | None) -> None:
    """`victim` is a worker; the launcher is killed in its place where there is none yet."""
    who, how = harm.split()[:2]
    if "worker stopped" in harm and victim is not None:
        os.kill(victim, signal.SIGSTOP)
    number = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM}.get(
        how.rstrip(","), signal.SIGINT
    )
    if who == "launcher":
        os.kill(launcher, number)
    elif victim is None:
        os.kill(launcher, signal.SIGKILL)
    elif how != "stopped":
        os.kill(victim, number)


def others_started(scratch: Path, victim: int | None) -> bool:
    started = set(scratch.glob("started*"))
    return len(started - {started_file(scratch, victim or 0)}) >= WORLD - 1


def marked(scratch: Path) -> list[int]:
    """Processes that were started with the mark in their environment: workers, and who watches over them."""
    sign = f"{MARK}={scratch}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if sign in environment.split(b"\0"):
                found.append(int(entry.name))
    return found


def is_worker(pid: int) -> bool:
    try:
        return b"thinwire.recipes.local_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def ended(pid: int) -> bool:
    """Whether a child of this process has; its remains are collected."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def wait_until(happened: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def partial_files(out: Path) -> list[Path]:
    folder = checkpoint_folder(out)
    return list(folder.glob(".*")) if folder.is_dir() else []
