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


def broken(device: torch.device, batch: int) -> Workload:
    raise RuntimeError("this model cannot be built")
