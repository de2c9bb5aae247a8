"""Tasks of our own, small enough to train in a moment; some of them break on rank 1."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from thinwire.recipes.config import Training
from thinwire.recipes.tasks import Data, Examples, Task


def load() -> Data:
    """Which of three numbers is the largest?"""
    inputs = torch.rand(150, 3, generator=torch.Generator().manual_seed(1))
    examples = Examples(inputs, inputs.argmax(1))
    return Data(examples, examples)


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)
    )


def score(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float()


def is_broken_rank() -> bool:
    return os.environ["RANK"] == "1"


def raise_on_rank_1(outputs: Tensor, targets: Tensor) -> Tensor:
    if is_broken_rank():
        raise RuntimeError("the cat sat on the keyboard")
    return cross_entropy(outputs, targets)


def die_on_rank_1(outputs: Tensor, targets: Tensor) -> Tensor:
    if is_broken_rank():
        os.kill(os.getpid(), signal.SIGKILL)
    return cross_entropy(outputs, targets)


TINY = Task(
    load=load,
    build=build,
    loss=cross_entropy,
    score=score,
    training=Training(epochs=2, batch_size=8, lr=0.1, warmup_steps=3),
)
RAISING = replace(TINY, loss=raise_on_rank_1)
DYING = replace(TINY, loss=die_on_rank_1)
NOT_A_TASK = 7
