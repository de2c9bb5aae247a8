"""What the rank scripts of this folder share: a seat in a group of real ranks, and a file of verdicts.

Each script runs once per rank, on NCCL with a GPU and on gloo without, started by the lab or by torchrun:

    thinwire lab --hosts 4 --rate 10gbit --share-gpu --mps -- python -m tests.gpu.contracts --out verdicts.json
    torchrun --nproc-per-node 4 -m tests.gpu.contracts --device cpu adtopk topk

A verdict is saved as soon as it is known, and what has one is not run again: after a crash the same command goes on
with the next check. A check that takes longer than `--limit` is one that hangs: its verdict says where, what all threads
did is in the output, and the processes end. Exit codes: 0 all is well, 1 something is broken, 75 start again for the rest.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.tools.files import write_text
from thinwire.tools.methods import METHODS, Preset

OK = "ok"
BROKEN = "broken"
SKIPPED = "skipped"
CRASHED = "crashed"
HUNG = "hung"
STARTED = "started"
EXIT_BROKEN = 1
EXIT_AGAIN = 75
TIMEOUT = timedelta(seconds=60)
NOTE_LINES = 8
LIMIT_S = 20.0
TELLING_S = 1.0
"""For the other ranks to tell where they are, before this one ends and all are ended."""


NAMED = {
    **METHODS,
    "quantized-16bit": Preset("Quantized", bits=16),
    "quantized-fp8": Preset("Quantized", bits="fp8"),
}
"""What scripts can be asked for: the names of the registry, and the codes that have none there."""


class Skip(Exception):
    """A check that does not apply, and why."""


@dataclass(frozen=True)
class Seat:
    """One rank of a group."""

    rank: int
    world: int
    device: torch.device

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values


Check = Callable[[Seat, str], str | None]
"""check(seat, method name) raises if something is broken, or Skip; it may return a note."""


def make_method(name: str) -> Any:
    preset = NAMED[name]
    # Small enough for a small model to be compressed by every method.
    small = {"density": 0.05, "rank": 2}
    return preset.build({key: value for key, value in small.items() if preset.takes(key)}, name)


def take_seat(device: str) -> Seat:
    """Join the group that the environment describes."""
    # Handles are closed with something held back all the time here.
    logging.getLogger("thinwire.handle").setLevel(logging.ERROR)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=TIMEOUT)
        return Seat(rank, world, torch.device("cpu"))
    # Ranks that share a GPU have to look like hosts of their own; the lab sees to that itself.
    os.environ.setdefault("NCCL_HOSTID", f"host{rank}")
    # Resuming is compared bit for bit, so the model itself must not vary.
    torch.backends.cudnn.deterministic = True
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(where)
    dist.init_process_group("nccl", device_id=where, timeout=TIMEOUT)
    return Seat(rank, world, where)


class VerdictBook:
    """Verdicts by (method, check), in a JSON file of one line each; rank 0 writes it."""

    def __init__(self, path: Path | None, *, writes: bool) -> None:
        self.path = path
        self.writes = writes
        self.verdicts: dict[tuple[str, str], dict[str, Any]] = {}
        if writes and path is not None and path.exists():
            for verdict in read_verdicts(path):
                if verdict["status"] == STARTED:
                    verdict = {**verdict, "status": CRASHED, "note": "the processes ended in it"}
                self.verdicts[verdict["method"], verdict["check"]] = verdict

    def put(self, method: str, check: str, status: str, **values: Any) -> None:
        entry = {"method": method, "check": check, "status": status, **values}
        self.verdicts[method, check] = entry
        if self.writes and self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lines = ",\n".join(json.dumps(verdict) for verdict in self.verdicts.values())
            write_text(self.path, f"[\n{lines}\n]\n")

    def count(self, *statuses: str) -> int:
        return sum(verdict["status"] in statuses for verdict in self.verdicts.values())


def read_verdicts(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())


def run_checks(
    seat: Seat,
    book: VerdictBook,
    methods: Sequence[str],
    checks: Mapping[str, Check],
    limit: float | None = None,
) -> int:
    """Every check of every method that has no verdict yet; the exit code. The process ends in a check that takes more seconds
    than `limit`."""
    # Only rank 0 has read the file; all must agree on what is left.
    book.verdicts = seat.gather(book.verdicts)[0]
    done = set(book.verdicts)
    for name in methods:
        for title, check in checks.items():
            if (name, title) in done:
                continue
            book.put(name, title, STARTED)
            began = time.monotonic()
            with limited(limit, partial(book.put, name, title, HUNG, seconds=limit)):
                mine = judge(seat, name, check)
                verdicts = seat.gather(mine)
            status, note = combine(verdicts)
            seconds = round(time.monotonic() - began, 2)
            book.put(name, title, status, seconds=seconds, note=note)
            if seat.rank == 0:
                print(
                    f"{name:20} {title:14} {status:8} {seconds:6.1f} s  {note}".rstrip(), flush=True
                )
            if status == BROKEN and len({repr(verdict) for verdict in verdicts}) > 1:
                # Some ranks left where others went on: the group can no longer be trusted.
                return EXIT_AGAIN
            if status == BROKEN and not device_works(seat):
                return EXIT_AGAIN
    return EXIT_BROKEN if book.count(BROKEN, CRASHED, HUNG) else 0


@contextmanager
def limited(seconds: float | None, put: Callable[..., None]) -> Iterator[None]:
    """End the process if the block takes longer. What all threads do is printed, and what the caller does is `put` as a note."""
    if seconds is None:
        yield
        return
    caller = threading.get_ident()

    def give_up() -> None:
        faulthandler.dump_traceback(all_threads=True)
        put(note="".join(traceback.format_stack(sys._current_frames()[caller])[-NOTE_LINES:]))
        time.sleep(TELLING_S)
        os._exit(EXIT_AGAIN)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    # Needs no thread of Python's: whoever hangs may never let another one run.
    faulthandler.dump_traceback_later(seconds + 2 * TELLING_S, exit=True)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def judge(seat: Seat, name: str, check: Check) -> tuple[str, str]:
    """(status, note) on this rank."""
    try:
        note = check(seat, name)
        seat.wait()
        return OK, note or ""
    except Skip as reason:
        return SKIPPED, str(reason)
    except Exception:
        return BROKEN, "".join(traceback.format_exc().splitlines(keepends=True)[-NOTE_LINES:])
    finally:
        if seat.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def combine(verdicts: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """All ranks' verdicts as one: the first that is broken, else rank 0's."""
    for rank, (status, note) in enumerate(verdicts):
        if status == BROKEN:
            return BROKEN, f"rank {rank}: {note}"
    return verdicts[0]


def device_works(seat: Seat) -> bool:
    try:
        seat.wait()
    except RuntimeError:
        return False
    return True


def run_script(description: str, checks: Mapping[str, Check], methods: Sequence[str]) -> None:
    """The main function of a rank script; ends the process."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("methods", nargs="*", help="by name; default all that apply")
    parser.add_argument(
        "--out", type=Path, help="JSON file of the verdicts; what is in it is not run again"
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a check")
    options = parser.parse_args()
    unknown = [name for name in options.methods if name not in NAMED]
    if unknown:
        parser.error(f"{unknown[0]!r} is no method; there are {', '.join(NAMED)}")
    seat = take_seat(options.device)
    book = VerdictBook(options.out, writes=seat.rank == 0)
    code = run_checks(seat, book, options.methods or methods, checks, options.limit)
    if code != EXIT_AGAIN:
        dist.barrier()
    # Not through the interpreter's end, where a broken group would be waited for.
    os._exit(code)
