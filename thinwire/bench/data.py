"""Data on which selections are judged: four laws, and gradients of a small network while it learns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LAWS = ("gauss", "laplace", "student3", "lognormal")


def draw(law: str, count: int, seed: int = 0) -> Tensor:
    """`count` independent values, symmetric around 0; Student's t has 3 degrees of freedom, log-normal sigma 1.5."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, generator=generator)
    match law:
        case "gauss":
            return normal
        case "laplace":
            return normal.sign() * -torch.rand(count, generator=generator).clamp(min=1e-12).log()
        case "student3":
            chi = (torch.randn(3, count, generator=generator) ** 2).sum(0) / 3
            return normal / chi.sqrt()
        case "lognormal":
            return normal.sign() * (1.5 * torch.randn(count, generator=generator)).exp()
    raise ValueError(f"unknown law {law!r}")


def real_gradients(seed: int = 0, width: int = 64, steps: int = 5) -> dict[str, Tensor]:
    """The weight gradients of a convolutional network after a few steps on images whose brightness tells the class."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 64, width),
            nn.ReLU(),
            nn.Linear(width, 64),
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        labels = torch.randint(0, 10, (16,), generator=generator)
        images = torch.randn(16, 3, 16, 16, generator=generator) + labels[:, None, None, None] / 5
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.dim() > 1}
    return {name: g.reshape(-1).clone() for name, g in gradients.items() if g is not None}
