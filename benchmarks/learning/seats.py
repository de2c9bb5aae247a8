"""Seats: processes that train one cell after the other, several at once on one device.

A process keeps its data, its compiled kernels and its CUDA context from cell to cell. One that fails is replaced, because an
error of a kernel can leave CUDA unusable.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from thinwire.observe.metrics import MetricsLog, Record

GRACE_S = 8.0
"""How long a process may take to stop when time is up."""
Event = tuple[str, str, Any]
"""(key of the order, "epoch" | "done" | "failed" | "late" | "skipped", content)."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """A cell to be trained, as plain values."""

    key: str
    settings: dict[str, Any]
    deadline: float
    """On the monotonic clock, which all processes share."""


class TimeUp(Exception):
    """The sitting is over."""


# -- in the parent -----------------------------------------------------------------------------------------------------


class Seat:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.order: Order | None = None

    def give(self, order: Order) -> None:
        self.order = order
        # Whether the process has died meanwhile shows when it is listened to.
        with contextlib.suppress(OSError):
            self.pipe.send(order)

    def dismiss(self) -> None:
        """Let the process go when it has done what it is doing."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)

    def end(self, patience_s: float) -> None:
        self.process.join(patience_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Seats:
    """Opened when there is something to do, so that a finished table costs no start."""

    def __init__(self, count: int, say: Callable[[str], None]) -> None:
        self.count = count
        self._say = say
        self._seats: list[Seat] = []
        self._said: set[str] = set()

    def run(self, orders: Sequence[Order], fits: Callable[[Order], bool]) -> Iterator[Event]:
        """Train what fits when its turn comes; yields what happens, until nothing is left to wait for."""
        waiting = list(orders)
        while True:
            busy = [seat for seat in self._seats if seat.order is not None]
            while len(self._seats) < min(self.count, len(busy) + len(waiting)):
                self._seats.append(Seat())
            for seat in self._seats:
                while seat.order is None and waiting:
                    order = waiting.pop(0)
                    if fits(order):
                        seat.give(order)
                    else:
                        yield order.key, "skipped", None
            at_work = {seat.pipe: seat for seat in self._seats if seat.order is not None}
            if not at_work:
                return
            for pipe in wait(list(at_work), timeout=self._patience(at_work.values())):
                assert isinstance(pipe, Connection)
                yield from self._hear(at_work[pipe])
            for seat in at_work.values():
                if seat.order is not None and time.monotonic() > seat.order.deadline + GRACE_S:
                    yield seat.order.key, "late", None
                    self._drop(seat, patience_s=0.0)

    def _patience(self, busy: Iterable[Seat]) -> float:
        last = max(seat.order.deadline for seat in busy if seat.order is not None)
        return max(0.0, last + GRACE_S - time.monotonic()) + 0.1

    def _hear(self, seat: Seat) -> Iterator[Event]:
        assert seat.order is not None
        key = seat.order.key
        try:
            kind, content = seat.pipe.recv()
        except (EOFError, OSError):
            seat.process.join(1.0)
            kind, content = "failed", f"its process ended with {seat.process.exitcode}"
        if kind == "failed":
            self._say(f"{key} failed" + ("" if content in self._said else f": {content[-1500:]}"))
            self._said.add(content)
            self._drop(seat, patience_s=3.0)
        elif kind != "epoch":
            seat.order = None
        yield key, kind, content

    def _drop(self, seat: Seat, patience_s: float) -> None:
        """Another one is opened when it is needed."""
        seat.order = None
        seat.end(patience_s)
        self._seats.remove(seat)

    def close(self) -> None:
        until = time.monotonic() + GRACE_S
        for seat in self._seats:
            seat.dismiss()
        for seat in self._seats:
            seat.end(max(0.0, until - time.monotonic()))
        self._seats.clear()


# -- in the processes --------------------------------------------------------------------------------------------------


def serve(pipe: Connection) -> None:
    """Train what is ordered until there is nothing more."""
    import torch

    torch.set_num_threads(1)
    # Convolutions use TF32 by default; so do matrix products here.
    torch.set_float32_matmul_precision("high")
    logging.getLogger("thinwire.handle").setLevel(logging.ERROR)
    loaded: dict[str, Any] = {}
    while (order := pipe.recv()) is not None:
        answer: tuple[str, Any]
        try:
            answer = "done", train_cell(order, loaded, pipe)
        except TimeUp:
            answer = "late", None
        except Exception:
            pipe.send(("failed", traceback.format_exc()))
            sys.exit(1)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        pipe.send(answer)


class Pulse(MetricsLog):
    """Passes a run's tests on, times its parts, and ends it when time is up."""

    def __init__(self, pipe: Connection, deadline: float) -> None:
        self.losses: list[float] = []
        self.first_steps = 0
        """How many steps the first look at the clock after them, `first_step_at`, stands for."""
        self.first_step_at = self.test_s = 0.0
        self._pipe = pipe
        self._deadline = deadline
        self._began = self._last = time.monotonic()
        self._since_test: list[float] = []

    def add(self, records: list[Record]) -> None:
        now = time.monotonic()
        for record in records:
            if record["event"] == "step":
                if not self.losses:
                    self.first_step_at, self.first_steps = now - self._began, len(records)
                self.losses.append(record["loss"])
                self._since_test.append(record["loss"])
            elif record["event"] == "test":
                self.test_s = now - self._last
                self._send(record, now)
        self._last = now
        if now > self._deadline:
            raise TimeUp

    def _send(self, record: Record, now: float) -> None:
        losses, self._since_test = self._since_test, []
        content = {
            "step": record["step"],
            "score": finite(record["score"]),
            "loss": finite(sum(losses) / max(1, len(losses))),
            "seconds": round(now - self._began, 2),
        }
        self._pipe.send(("epoch", content))

    def close(self) -> None: ...


class Sentences(logging.Handler):
    """Keeps what the library has to say."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


def train_cell(order: Order, loaded: dict[str, Any], pipe: Connection) -> dict[str, Any]:
    """One run on the recipes' own loop; its row, with all that tells where it comes from, and how long its parts took."""
    import torch

    from thinwire.methods.registry import find_preset
    from thinwire.observe.provenance import describe_origin
    from thinwire.recipes.checkpoints import Checkpoints
    from thinwire.recipes.device import choose_device, prefer_determinism
    from thinwire.recipes.job import build_job
    from thinwire.recipes.loop import Run, Trainer, count_steps_per_epoch
    from thinwire.recipes.parallel import join
    from thinwire.recipes.simulated import SimulatedReplica

    began = time.monotonic()
    job = build_job("train", order.settings, out=Path())
    (cell,) = job.cells()
    device = choose_device(job.running)
    prefer_determinism(job.running.deterministic)
    task, data = load_data(job, device, loaded)
    workers = join(job.running, device)
    steps_per_epoch = count_steps_per_epoch(data.train, cell.training, workers.world)
    lr = cell.training.lr * find_preset(cell.method).lr_scale
    run = Run(
        label=order.key,
        method_name=cell.method,
        method=cell.build_method(steps_per_epoch),
        training=replace(cell.training, lr=lr),
        stop_after=job.running.steps,
        about=cell.about,
    )
    pulse, sentences = Pulse(pipe, order.deadline), Sentences()
    logger = logging.getLogger("thinwire.adapters")
    logger.addHandler(sentences)
    torch.manual_seed(cell.training.seed)
    model = task.build(data.kind, job.source.tiny)
    trainer = Trainer(run, model, data, workers, pulse, Checkpoints(Path(), workers, None))
    row = trainer.train()
    logger.removeHandler(sentences)
    replica = trainer.replica
    assert isinstance(replica, SimulatedReplica)
    entry = {
        **row.to_dict(),
        "steps_per_epoch": steps_per_epoch,
        "graph": replica.simulation.graphed,
        "about": cell.about,
        "origin": describe_origin(),
    }
    replica.close()
    step_s = (row.ms_per_step or 0.0) / 1000
    return {
        "entry": entry,
        "losses": pulse.losses[:100],
        "reason": " ".join(sentences.heard),
        "setup_s": max(0.0, pulse.first_step_at - pulse.first_steps * step_s),
        "test_s": pulse.test_s,
        "seconds": time.monotonic() - began,
    }


def load_data(job: Any, device: Any, loaded: dict[str, Any]) -> tuple[Any, Any]:
    """The task and its data on the device; those of the last task are kept."""
    from thinwire.recipes.examples import Data

    name = job.choice.label
    if name not in loaded:
        task = job.choice.find()
        data = task.load(job.source)
        loaded.clear()
        loaded[name] = task, Data(data.kind, data.train.to(device), data.test.to(device))
    return loaded[name]


def finite(value: float) -> float | None:
    """JSON has no NaN; a score that was lost is null."""
    return value if math.isfinite(value) else None
