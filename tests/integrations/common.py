"""What the tests of the frameworks share."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw

METHOD = tw.TopK(density=0.05)


def as_launched(rank: int, world: int) -> None:
    """The variables that torchrun sets, by which frameworks know where they are."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        ACCELERATE_USE_CPU="1",
        TOKENIZERS_PARALLELISM="false",
    )


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))


def make_data(size: int = 256) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(size, 64, generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs[:, :8].argmax(dim=1))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def are_identical(values: torch.Tensor) -> bool:
    """On all ranks."""
    everyone = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, values)
    return all(torch.equal(everyone[0], one) for one in everyone)
