"""Models that tests hand to the step benchmark as module:function."""

from __future__ import annotations

import torch
from torch import nn

from thinwire.bench.models import Workload


def tiny(device: torch.device, batch: int) -> Workload:
    return Workload(
        nn.Linear(64, 32),
        draw=lambda: torch.randn(batch, 64),
        loss=lambda model, inputs: model(inputs).square().mean(),
    )


def deep(device: torch.device, batch: int) -> Workload:
    """Parameters for several fragments."""
    return Workload(
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))),
        draw=lambda: torch.randn(batch, 64),
        loss=lambda model, inputs: model(inputs).square().mean(),
    )


def broken(device: torch.device, batch: int) -> Workload:
    raise RuntimeError("this model cannot be built")
