"""Tasks of our own, small enough to train in a moment; some of them break on rank 1."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from thinwire.recipes.config import Training
from thinwire.recipes.examples import Batch, Data, DataOptions, TensorExamples
from thinwire.recipes.kinds import Carry, Kind
from thinwire.recipes.objectives.images import Images
from thinwire.recipes.tasks import Task


def numbers(kind: Kind) -> Data:
    """Which of three numbers is the largest?"""
    inputs = torch.rand(150, 3, generator=torch.Generator().manual_seed(1))
    examples = TensorExamples((inputs, inputs.argmax(1)))
    return Data(kind, examples, examples)


def load(options: DataOptions) -> Data:
    return numbers(Images(channels=1, height=1, width=3, classes=3))


def build(kind: Kind, tiny: bool) -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)
    )


@dataclass(frozen=True, kw_only=True)
class Breaking(Images):
    """Breaks on rank 1 while it learns."""

    how: str

    def loss(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        if os.environ["RANK"] == "1":
            match self.how:
                case "raises":
                    raise RuntimeError("the cat sat on the keyboard")
                case "is killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stops":
                    os.kill(os.getpid(), signal.SIGSTOP)
        return super().loss(model, batch, carry)


def load_breaking(how: str, options: DataOptions) -> Data:
    return numbers(Breaking(channels=1, height=1, width=3, classes=3, how=how))


@dataclass(frozen=True, kw_only=True)
class Waiting(Images):
    """Says that it is at work, connected to the others, and goes on when it is told to."""

    folder: Path

    def loss(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        (self.folder / f"at-work{os.environ['RANK']}").write_text(str(os.getpid()))
        while not (self.folder / "go-on").exists():
            time.sleep(0.05)
        return super().loss(model, batch, carry)


def load_waiting(options: DataOptions) -> Data:
    assert options.data_dir is not None
    return numbers(Waiting(channels=1, height=1, width=3, classes=3, folder=options.data_dir))


def load_forever(options: DataOptions) -> Data:
    """Holds a lock on a file of its own, as long as the process lives."""
    assert options.data_dir is not None
    partial = options.data_dir / f".worker{os.environ['RANK']}"
    with partial.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(os.getpid(), file=lock, flush=True)
        partial.rename(options.data_dir / partial.name[1:])
        time.sleep(600)
    raise AssertionError("nobody ended this process")


TINY = Task(
    load=load, build=build, training=Training(epochs=2, batch_size=8, lr=0.1, warmup_steps=3)
)
RAISING = replace(TINY, load=partial(load_breaking, "raises"))
DYING = replace(TINY, load=partial(load_breaking, "is killed"))
STOPPING = replace(TINY, load=partial(load_breaking, "stops"))
LOADING = replace(TINY, load=load_forever)
WAITING = replace(TINY, load=load_waiting)
NOT_A_TASK = 7
