"""Persistent worker pools: real gloo groups that live for the whole test session.

Workers are forked from one process that has imported torch for all of them. A test hands over a top-level function; every rank of the pool runs it and returns a picklable result. A job that
outlives its timeout ends the pool's processes, so no test can hang the suite.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import re
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GROUP_TIMEOUT = timedelta(seconds=60)
TELLS_AFTER = 120.0
"""Seconds after which a rank that is still busy prints where its threads are, before nobody waits any more."""
PATIENCE = 150.0
"""Seconds that a job may take: a machine may be many times slower than this one, and pytest ends a test after 180."""


def workers_context() -> Any:
    """Processes are forked from one that has imported what all of them need."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


class WorkerError(AssertionError):
    """A job raised on some rank; the message holds the traceback of the first such rank."""


class Pool:
    """`world` processes joined in one gloo group."""

    def __init__(
        self, world: int, group_timeout: timedelta = GROUP_TIMEOUT, *, keep_groups: bool = False
    ) -> None:
        """With `keep_groups` the groups that a job makes live on: device meshes find theirs by name, in later jobs too."""
        self.world = world
        self.keep_groups = keep_groups
        self.group_timeout = group_timeout
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, job: Callable[..., Any], *args: Any, timeout: float = PATIENCE) -> list[Any]:
        """job(rank, world, *args) on every rank; the results in rank order."""
        replies = self.attempt(job, *args, timeout=timeout)
        for rank, (ok, value) in enumerate(replies):
            if not ok:
                raise WorkerError(f"rank {rank} of {self.world}:\n{value}")
        return [value for _, value in replies]

    def attempt(
        self, job: Callable[..., Any], *args: Any, timeout: float = PATIENCE
    ) -> list[tuple[bool, Any]]:
        """Like `run`, but returns (True, result) or (False, traceback) per rank."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((job, args))
        replies: dict[int, tuple[bool, Any]] = {}
        worn = False
        waiting = dict(zip(self._pipes, range(self.world), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout=timeout)
            if not ready:
                self.stop()
                raise WorkerError(f"no answer from ranks {sorted(waiting.values())} in {timeout} s")
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    *reply, left_names = pipe.recv()  # type: ignore[union-attr]
                    replies[rank] = tuple(reply)
                    worn |= left_names
                except EOFError:
                    replies[rank] = (False, "the process died")
        if worn or any(not ok for ok, _ in replies.values()):
            # A rank that failed in mid-exchange leaves its peers' group in an unknown state.
            self.stop()
        return [replies[rank] for rank in range(self.world)]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = workers_context()
        store = Path(tempfile.mkdtemp(prefix="pool")) / "store"
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.world, str(store), self.group_timeout, theirs, self.keep_groups),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(
    rank: int, world: int, store: str, timeout: timedelta, pipe: Connection, keep_groups: bool
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout
    )
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:
            os._exit(0)
        faulthandler.dump_traceback_later(TELLS_AFTER)
        try:
            reply = (True, job(rank, world, *args))
        except BaseException:
            reply = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        left_names = False if keep_groups else _drop_extra_groups()
        with contextlib.suppress(BrokenPipeError):
            pipe.send((*reply, left_names))


def _drop_extra_groups() -> bool:
    """Groups a job made (thinwire's own among them) would pile up threads and sockets over a session.

    True if one of them was named after its ranks: the next group of these ranks gets that name again, and would read
    the addresses of the old one in the store.
    """
    gc.collect()
    default = dist.group.WORLD
    names = dist.distributed_c10d._world.pg_names
    extra = [group for group in list(dist.distributed_c10d._world.pg_map) if group is not default]
    named_after_ranks = any(not re.match(r"thinwire-|\d+$", names[group]) for group in extra)
    for group in extra:
        dist.destroy_process_group(group)
    return named_after_ranks
