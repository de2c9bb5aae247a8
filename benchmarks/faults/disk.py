"""Disks that are full or may not be written to: a sentence, and what was there stays.

As root the disk is a small tmpfs in a mount namespace of the child, which goes with it; else the size of files is limited and the
folder's mode is taken away.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from faults.groups import fork
from faults.parts import Tally
from thinwire.errors import JobError
from thinwire.recipes.checkpoints import Checkpoints
from thinwire.recipes.sealed import check_seal
from thinwire.recipes.simulated import SimulatedWorkers

CLONE_NEWNS = 0x00020000
MS_PRIVATE_RECURSIVE = 0x4000 | 0x40000
MS_REMOUNT_READ_ONLY = 0x20 | 0x1
DISK_BYTES = 512 * 1024
STATE_FLOATS = 20_000
OUTCOMES = ("refused in a sentence", "damaged", "said nothing", "did not recover")


def run(first: int, last: int, folder: Path) -> Iterator[Tally]:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(first, last):
        kind = ("full", "read-only")[number % 2]
        place, log = folder / f"disk{number}", folder / "log"
        place.mkdir(exist_ok=True)
        pid = fork(lambda place=place, kind=kind: harm(place, kind), log)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        outcome = OUTCOMES[code - 10] if 10 <= code < 14 else "failed otherwise"
        yield {"units": 1, kind: 1, outcome: 1}


def harm(place: Path, kind: str) -> int:
    """In the child: save until it is refused, look at what is there, make room, save again."""
    root = os.geteuid() == 0
    libc = ctypes.CDLL(None, use_errno=True)
    if root:
        assert libc.unshare(CLONE_NEWNS) == 0
        libc.mount(b"none", b"/", None, MS_PRIVATE_RECURSIVE, None)
        options = f"size={DISK_BYTES}".encode()
        assert libc.mount(b"tmpfs", bytes(place), b"tmpfs", 0, options) == 0
    workers = SimulatedWorkers(1, torch.device("cpu"), graph=False)
    checkpoints = Checkpoints(place / "run", workers, 1)
    save(checkpoints, 1)
    if kind == "read-only" and root:
        assert libc.mount(None, bytes(place), None, MS_REMOUNT_READ_ONLY, None) == 0
    elif kind == "read-only":
        checkpoints.folder.chmod(0o555)
    elif not root:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    there = {path: path.read_bytes() for path in checkpoints.folder.glob("*.pt")}
    filler = place / "filler"
    if kind == "full" and root:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    try:
        save(checkpoints, 2)
        return 12
    except JobError as error:
        if "cannot be written (" not in str(error):
            return 12
    if there != {path: path.read_bytes() for path in checkpoints.folder.glob("*")}:
        return 11
    for path in there:
        check_seal(path)
    if kind == "read-only":
        return 10
    filler.unlink(missing_ok=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    save(checkpoints, 3)
    state = checkpoints.load_latest()
    return 10 if state is not None and state["step"] == 3 else 13


def save(checkpoints: Checkpoints, step: int) -> None:
    state = {"world": 1, "processes": 1, "step": step, "model": torch.full((STATE_FLOATS,), 1.0)}
    checkpoints.save(step, state)
