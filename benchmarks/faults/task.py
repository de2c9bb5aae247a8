"""The task that is trained and killed: small, with momentum, residuals and tests, and as slow as the environment says."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from thinwire.recipes.config import Training
from thinwire.recipes.examples import Batch, Data, DataOptions, TensorExamples
from thinwire.recipes.kinds import Carry, Kind
from thinwire.recipes.objectives.images import Images
from thinwire.recipes.tasks import Task

DELAY = "THINWIRE_FAULTS_DELAY"
"""Seconds that a step takes longer."""
MARK = "THINWIRE_FAULTS_MARK"
"""A folder: what runs for it has it in its environment, and workers that have started say so there."""
STEPS = 300
BATCH = 4


@dataclass(frozen=True, kw_only=True)
class Slow(Images):
    def loss(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        time.sleep(float(os.environ.get(DELAY, "0")))
        return super().loss(model, batch, carry)


def load(options: DataOptions) -> Data:
    if MARK in os.environ:
        started_file(Path(os.environ[MARK]), os.getpid()).touch()
    inputs = torch.rand(400, 8, generator=torch.Generator().manual_seed(1))
    examples = TensorExamples((inputs, inputs.argmax(1)))
    return Data(Slow(channels=1, height=1, width=8, classes=8), examples, examples)


def started_file(folder: Path, pid: int) -> Path:
    """There from the moment at which a worker has imported everything and goes to meet the others."""
    return folder / f"started{pid}"


def build(kind: Kind, tiny: bool) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
    )


TASK = Task(
    load=load, build=build, training=Training(epochs=100, batch_size=BATCH, lr=0.05, warmup_steps=9)
)
