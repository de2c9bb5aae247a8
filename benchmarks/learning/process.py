"""Process: trains one cell after the other on the recipes' own loop, and tells the sitting how it goes."""

from __future__ import annotations

import gc
import logging
import math
import statistics
import sys
import time
import traceback
from collections import deque
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learning.orders import Epochs, Order, Stop
from thinwire.tools.metrics import MetricsLog, Record

if TYPE_CHECKING:
    from thinwire.recipes.loop import Trainer

TEST_SHARE = 0.07
"""Of an epoch's time, what its test takes, before one was measured."""
KEPT_LOSSES = 10
"""Of the first steps, to compare runs by."""

LOOKS = 4
"""At the clock, between which a pace is measured."""
Look = tuple[int, float]
"""(steps done, time)"""


class TimeUp(Exception):
    """The sitting is over."""


class Stopped(Exception):
    """Somebody else needs the machine more."""


def serve(pipe: Connection) -> None:
    """Train what is ordered until there is nothing more."""
    import torch

    # What cells need is there when the first of them is ordered.
    import thinwire.recipes.assembly
    import thinwire.recipes.simulated  # noqa: F401

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    torch.set_num_threads(1)
    # Convolutions use TF32 by default; so do matrix products here.
    torch.set_float32_matmul_precision("high")
    logging.getLogger("thinwire.handle").setLevel(logging.ERROR)
    loaded: dict[str, Any] = {}
    while (order := pipe.recv()) is not None:
        if not isinstance(order, Order):
            # It was meant for a cell that has ended meanwhile.
            continue
        answer: tuple[str, Any]
        try:
            answer = "done", train_cell(order, loaded, pipe)
        except TimeUp:
            answer = "late", None
        except Stopped:
            answer = "stopped", None
        except Exception:
            pipe.send(("failed", traceback.format_exc()))
            sys.exit(1)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        pipe.send(answer)


class Pulse(MetricsLog):
    """Passes a run's pace and tests on, hears what the parent has to say, and ends the run when time is up."""

    def __init__(self, order: Order, pipe: Connection, began: float) -> None:
        self.losses: list[float] = []
        self.epochs: int | None = None
        """As the parent has settled them."""
        self._order = order
        self._pipe = pipe
        self._open = order.fewest is not None
        self._trainer: Trainer | None = None
        self._began = self._last = began
        self._first: Look | None = None
        self._tested: Look | None = None
        self._looks: deque[Look] = deque(maxlen=LOOKS)
        self._since_test: list[float] = []

    def watch(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def add(self, records: list[Record]) -> None:
        now = time.monotonic()
        steps = [record for record in records if record["event"] == "step"]
        if steps:
            self._hear_steps(steps, now)
        for record in records:
            if record["event"] == "test":
                self._send_test(record, now)
        self._last = now
        while self._pipe.poll():
            self._obey(self._pipe.recv())
        if now > self._order.deadline:
            raise TimeUp
        if steps and self._open and steps[-1]["step"] >= self._settle_by:
            while self._open:
                self._obey(self._pipe.recv())

    def _hear_steps(self, steps: list[Record], now: float) -> None:
        losses = [record["loss"] for record in steps]
        self.losses += losses
        self._since_test += losses
        step = steps[-1]["step"]
        self._looks.append((step, now))
        if self._first is None:
            self._first = step, now
            # The steps so far were slowed down by setting up; but if they are all there is, they must do.
            if not (self._open and step >= self._settle_by):
                return
            self._looks.appendleft((0, self._last))
        if self._open or self._tested is None:
            (before, then), (after, until) = self._looks[0], self._looks[-1]
            epoch_s = (until - then) / (after - before) * self._steps_per_epoch * (1 + TEST_SHARE)
            self._send("pace", step, epoch_s, {"losses": self.losses[:KEPT_LOSSES]})

    def _send_test(self, record: Record, now: float) -> None:
        losses, self._since_test = self._since_test, []
        content = {
            "step": record["step"],
            "score": finite(record["score"]),
            "loss": finite(sum(losses) / max(1, len(losses))),
            "seconds": round(now - self._began, 2),
        }
        # The first epoch began with setting up, which is no part of the others.
        before, then = self._tested or self._first or (0, self._began)
        epoch_s = (now - then) * self._steps_per_epoch / max(1, record["step"] - before)
        self._tested = record["step"], now
        self._send("epoch", record["step"], epoch_s, {"test": content})

    def _send(self, kind: str, step: int, epoch_s: float, content: dict[str, Any]) -> None:
        first, then = self._first or (0, self._began)
        setup_s = max(0.0, then - self._began - first * epoch_s / self._steps_per_epoch)
        done = step / self._steps_per_epoch
        measured = {"done": done, "epoch_s": epoch_s, "setup_s": setup_s}
        self._pipe.send((kind, {**measured, **content}))

    @property
    def _steps_per_epoch(self) -> int:
        assert self._trainer is not None
        return self._trainer.steps_per_epoch

    @property
    def _settle_by(self) -> int:
        """The step after which the rate depends on the number of epochs, or the last one if they are the fewest."""
        assert self._trainer is not None and self._order.fewest is not None
        last = self._order.fewest * self._steps_per_epoch
        return min(last, self._trainer.learning_rate.warmup_steps)

    def _obey(self, message: Epochs | Stop | None) -> None:
        if not isinstance(message, Epochs):
            raise Stopped
        assert self._trainer is not None
        self.epochs, self._open = message.count, False
        self._trainer.learning_rate.end_after(message.count)

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
    from thinwire.recipes.assembly import make_trainer
    from thinwire.recipes.device import choose_device, prefer_determinism
    from thinwire.recipes.job import build_job
    from thinwire.recipes.parallel import join
    from thinwire.recipes.simulated import SimulatedReplica
    from thinwire.tools.provenance import describe_origin

    began = time.monotonic()
    job = build_job("train", order.settings, out=Path())
    (cell,) = job.cells()
    device = choose_device(job.running)
    prefer_determinism(job.running.deterministic)
    task, data = load_data(job, device, loaded)
    workers = join(job.running, device)
    pulse, sentences = Pulse(order, pipe, began), Sentences()
    logger = logging.getLogger("thinwire.adapters")
    logger.addHandler(sentences)
    trainer = make_trainer(job, replace(cell, label=order.key), task, data, workers, pulse)
    pulse.watch(trainer)
    try:
        row = trainer.train()
    finally:
        logger.removeHandler(sentences)
    replica = trainer.replica
    assert isinstance(replica, SimulatedReplica)
    epochs = pulse.epochs or cell.training.epochs
    about = {**cell.about, "training": {**cell.about["training"], "epochs": epochs}}
    entry = {
        **row.to_dict(),
        "epochs": epochs,
        "steps_per_epoch": trainer.steps_per_epoch,
        "train_loss": finite(statistics.fmean(pulse.losses[-trainer.steps_per_epoch :])),
        "graph": replica.simulation.graphed,
        "about": about,
        "origin": describe_origin(),
    }
    replica.close()
    return {
        "entry": entry,
        "losses": pulse.losses[:KEPT_LOSSES],
        "reason": " ".join(sentences.heard),
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
