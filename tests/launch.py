"""Scripts as users start them: one process per rank, with the variables that torchrun sets."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from tests.pool import PATIENCE, workers_context

SCRIPTS = Path(__file__).parent / "scripts"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environments(world: int) -> list[dict[str, str]]:
    """What torchrun tells each rank."""
    common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        {**common, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)
    ]


def start(script: str | Path, world: int, *args: str, **env: str) -> list[subprocess.Popen]:
    """The processes, in rank order; a script's name is looked up in tests/scripts."""
    command = [sys.executable, str(SCRIPTS / script), *args]
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **told, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for told in rank_environments(world)
    ]


def finish(workers: list[subprocess.Popen], timeout: float = PATIENCE) -> list[str]:
    """What every rank printed; nobody outlives this."""
    try:
        return [worker.communicate(timeout=timeout)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def launch(script: str | Path, world: int, *args: str, **env: str) -> list[str]:
    """Run a script to its end on every rank, all of which must end well; what each printed."""
    workers = start(script, world, *args, **env)
    outputs = finish(workers)
    assert all(worker.returncode == 0 for worker in workers), "\n".join(outputs)
    return outputs


def launch_forks(script: str | Path, world: int, *args: str) -> list[str]:
    """As `launch`, of processes that are forked from one that has imported torch: that is most of a short script's time."""
    context = workers_context()
    command = [str(SCRIPTS / script), *args]
    with tempfile.TemporaryDirectory() as folder:
        shown = [Path(folder) / str(rank) for rank in range(world)]
        workers = [
            context.Process(target=run_script, args=(command, told, path), daemon=True)
            for told, path in zip(rank_environments(world), shown, strict=True)
        ]
        for worker in workers:
            worker.start()
        try:
            deadline = time.monotonic() + PATIENCE
            for worker in workers:
                worker.join(max(0.0, deadline - time.monotonic()))
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
        outputs = [path.read_text() for path in shown]
    assert all(worker.exitcode == 0 for worker in workers), "\n".join(outputs)
    return outputs


def run_script(command: list[str], environment: dict[str, str], shown: Path) -> None:
    """In a fork: as `python COMMAND`, with all that is printed in a file."""
    output = os.open(shown, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    code = 1
    try:
        runpy.run_path(command[0], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Gloo's threads can abort while the interpreter shuts down.
    os._exit(code)
