"""Small models that take local steps, for tests of them."""

from __future__ import annotations

import copy

import torch
from torch import nn

import thinwire as tw
from thinwire.adapters import LocalSimulation

WORKERS = 3
EXACT = tw.Dense()


def make_models(workers: int = WORKERS, width: int = 48) -> list[nn.Module]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, 8))
    return [copy.deepcopy(first) for _ in range(workers)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, model[0].in_features, generator=generator)  # type: ignore[index]
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def run(sim: LocalSimulation, models, optimizers, steps, first: int = 0) -> None:
    for step in range(first, first + steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inner_step(model, optimizer, rank, step)
        sim.step()


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def mean_in_rank_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """As dense parts are added: each is divided first."""
    total = parts[0] / len(parts)
    for part in parts[1:]:
        total = total + part / len(parts)
    return total
