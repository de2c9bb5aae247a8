"""Small models and loops that distributed tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def make_cnn(seed: int = 0) -> nn.Module:
    """Convolutions, normalisation and linear layers; a few compressible parameters, a few dense ones."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def batches(rank: int, steps: int, size: int = 8, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Random images and labels, different on every rank, the same in every run."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(steps):
        yield (
            torch.randn(size, 1, 8, 8, generator=generator),
            torch.randint(0, 10, (size,), generator=generator),
        )


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterator[tuple[Tensor, Tensor]],
    after: Callable[[int], None] | None = None,
) -> None:
    """A plain loop: zero_grad, backward, step."""
    for step, (images, labels) in enumerate(data):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if after is not None:
            after(step)


def fingerprint(model: nn.Module) -> bytes:
    """All parameters' bits; of sharded ones those of all shards."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    flat = torch.cat([p.detach().reshape(-1).contiguous().view(torch.uint8) for p in whole])
    return bytes(flat.tolist())
