"""Bits: whether what a killed job left is, bit for bit, what a job that nobody disturbed had at the same step."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from faults.groups import fork
from faults.task import STEPS
from thinwire.files import write_bytes
from thinwire.recipes import checkpoints
from thinwire.recipes.job import Job, build_job
from thinwire.recipes.sealed import DamagedFile, check_seal, load_sealed
from thinwire.recipes.worker import work
from thinwire.tools.processes import loopback

WORLD = 2
LABEL = "adtopk"


def make_job(out: Path, timeout_s: float = 20.0) -> Job:
    settings = {
        "task": {"name": "faults.task:TASK"},
        "method": {"name": LABEL, "density": 0.1, "dense_fallback": False},
        "run": {
            "workers": WORLD,
            "steps": STEPS,
            "checkpoint_every": 1,
            "deterministic": True,
            "device": "cpu",
            "timeout": timeout_s,
        },
    }
    return build_job("train", settings, out=out, resume=True)


def start_worker(job: Job, rank: int, store: Path, log: Path) -> int:
    """One worker of the job as a forked process; its process id."""

    def run() -> int:
        places = {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank)}
        os.environ |= {**places, "LOCAL_WORLD_SIZE": str(WORLD), **loopback()}
        work(job, store=store)
        return 0

    return fork(run, log)


def checkpoint_folder(out: Path) -> Path:
    return out / "checkpoints" / LABEL


def digest(state: Any) -> str:
    """Of everything in a checkpoint that is not a note about its settings."""
    found = hashlib.sha256()
    for name, value in walk({key: one for key, one in state.items() if key != "about"}, ""):
        found.update(name.encode())
        found.update(value)
    return found.hexdigest()


def walk(value: Any, name: str) -> Iterator[tuple[str, bytes]]:
    if isinstance(value, Tensor):
        yield (
            f"{name}:{value.dtype}",
            value.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from walk(value[key], f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for place, one in enumerate(value):
            yield from walk(one, f"{name}.{place}")
    else:
        yield name, repr(value).encode()


def reference(folder: Path) -> dict[str, str]:
    """The digest of every file of a job that nobody disturbed, by the file's name; computed once per folder."""
    known = folder / "reference.json"
    if known.exists():
        return dict(json.loads(known.read_text()))
    out = folder / "undisturbed"
    out.mkdir(parents=True, exist_ok=True)
    checkpoints.KEPT = STEPS + 1
    pids = [start_worker(make_job(out), r, folder / "store", out / f"log{r}") for r in range(WORLD)]
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    checkpoints.KEPT = 3
    if any(codes):
        raise RuntimeError(f"the undisturbed job failed; see {out}/log*")
    files = checkpoint_folder(out).glob("step*.pt")
    digests = {path.name: digest(load_sealed(path)) for path in files}
    write_bytes(known, json.dumps(digests).encode())
    return digests


def compare(out: Path, wanted: dict[str, str]) -> dict[str, float]:
    """Every checkpoint of a folder: whole ones with the right bits, whole ones with others, damaged ones."""
    counts = {"checkpoints with the same bits": 0.0, "other bits": 0.0, "torn checkpoints": 0.0}
    for path in checkpoint_folder(out).glob("step*.pt"):
        try:
            check_seal(path)
            same = digest(load_sealed(path)) == wanted[path.name]
            counts["checkpoints with the same bits" if same else "other bits"] += 1
        except DamagedFile:
            counts["torn checkpoints"] += 1
    return counts


def newest(out: Path) -> int:
    """The last step of which process 0 has a file, 0 if it has none."""
    names = [path.name for path in checkpoint_folder(out).glob("step*-process0.pt")]
    return max((int(name[4:12]) for name in names), default=0)
