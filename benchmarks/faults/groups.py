"""Groups: functions run on several ranks, each in a process forked from this one, which has imported everything already.

Two imports are for the children alone: a deterministic run and a compiled one would import them, each in every child.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist

from thinwire.tools.processes import loopback

TIMEOUT_S = 60.0
PR_SET_PDEATHSIG = 1


def fork(function: Callable[[], int], log: Path) -> int:
    """The process id of a child that runs `function`, writes to `log` and dies with this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        torch.set_num_threads(1)
        code = function()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def _leave(code: int) -> NoReturn:
    """Without Python's shutdown, in which gloo's threads can abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def join_group(rank: int, world: int, store: Path, timeout_s: float = TIMEOUT_S) -> None:
    os.environ |= loopback()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )


def run_group(world: int, job: Callable[..., Any], *settings: Any) -> list[Any]:
    """job(rank, world, *settings) on every rank of a new group; the results in rank order, RuntimeError if one has none."""
    gc.collect()
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        folder = Path(scratch)

        def work(rank: int) -> int:
            join_group(rank, world, folder / "store")
            result = job(rank, world, *settings)
            (folder / f"result{rank}").write_bytes(pickle.dumps(result))
            dist.barrier()
            return 0

        pids = [fork(lambda rank=rank: work(rank), folder / f"log{rank}") for rank in range(world)]
        for pid in pids:
            os.waitpid(pid, 0)
        results = [folder / f"result{rank}" for rank in range(world)]
        if not all(path.exists() for path in results):
            logs = "".join((folder / f"log{rank}").read_text() for rank in range(world))
            raise RuntimeError(f"{job.__name__}{settings} failed:\n{logs}")
        return [pickle.loads(path.read_bytes()) for path in results]
