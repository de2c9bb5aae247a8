"""A small model whose optimizer is Adam, trained with AdamScale on simulated workers, and without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import thinwire as tw

WORKERS = 3
START = 3
SETTINGS: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
LOSSLESS = tw.TopK(density=1.0, values="fp32", dense_fallback=False)
EVERY_STEP = tw.memory.Refresh(every=1, bits=32)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        (torch.randn(5, 8, generator=generator), torch.randn(5, 4, generator=generator))
        for _ in range(WORKERS)
    ]


def compute(model: nn.Module):
    return lambda x, y: nn.functional.mse_loss(model(x), y)


def in_scale(method: tw.Method = LOSSLESS, **settings: Any) -> tw.AdamScale:
    return tw.AdamScale(method=method, **{"start": START, **settings})


def start(
    method: tw.Method, kind: type = torch.optim.AdamW, options: dict[str, Any] | None = None, **more
) -> tuple[nn.Module, torch.optim.Optimizer, tw.Simulation]:
    model = make_model()
    optimizer = kind(model.parameters(), **{"lr": 0.05, **SETTINGS, **(options or {})})
    simulation = tw.simulate(
        model, method, workers=WORKERS, optimizer=optimizer, deterministic=True, **more
    )
    return model, optimizer, simulation


def train(optimizer, simulation, model, steps: range) -> list[list[Tensor]]:
    """The parameters after every step."""
    seen = []
    for step in steps:
        simulation.step(compute(model), batches(step))
        optimizer.step()
        seen.append([p.detach().clone() for p in model.parameters()])
    return seen


def train_plain(
    steps: int, kind: type = torch.optim.AdamW, options: dict[str, Any] | None = None
) -> list[list[Tensor]]:
    plain = make_model()
    optimizer = kind(plain.parameters(), **{"lr": 0.05, **SETTINGS, **(options or {})})
    seen = []
    for step in range(steps):
        step_plain(plain, optimizer, step)
        seen.append([p.detach().clone() for p in plain.parameters()])
    return seen


def step_plain(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """With the mean of the workers' gradients, added up as a deterministic exchange does it."""
    parameters = list(model.parameters())
    means = [torch.zeros_like(p) for p in parameters]
    for batch in batches(step):
        gradients = torch.autograd.grad(compute(model)(*batch), parameters)
        for mean, gradient in zip(means, gradients, strict=True):
            mean += gradient / WORKERS
    for parameter, mean in zip(parameters, means, strict=True):
        parameter.grad = mean
    optimizer.step()


def check_close(ours: list[list[Tensor]], theirs: list[list[Tensor]], bound: float) -> None:
    """To within `bound` learning rates, the size of a step."""
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert float((a - b).abs().max()) <= bound * 0.05


class Rule(Protocol):
    """One compressed parameter in plain torch."""

    def step(self, gradients: list[Tensor]) -> Tensor:
        """The mean of what the workers send, in units of the divisor."""


def train_by_rule(
    steps: int, take_over: Callable[[str, Tensor, Tensor], Rule]
) -> list[list[Tensor]]:
    """AdamW; matrices go by a rule behind START steps, which begins from (name, v with its bias corrected, momentum)."""
    lr, decay, eps = 0.05, SETTINGS["weight_decay"], SETTINGS["eps"]
    beta1, beta2 = SETTINGS["betas"]
    model = make_model()
    named = dict(model.named_parameters())
    m = {name: torch.zeros_like(p) for name, p in named.items()}
    v = {name: torch.zeros_like(p) for name, p in named.items()}
    rules: dict[str, Rule] = {}
    seen = []
    for t in range(1, steps + 1):
        of_workers = [
            torch.autograd.grad(compute(model)(*batch), list(named.values()))
            for batch in batches(t - 1)
        ]
        for i, (name, p) in enumerate(named.items()):
            gradients = [one[i] for one in of_workers]
            with torch.no_grad():
                p -= lr * decay * p
                if name in rules:
                    p -= lr / (1 - beta1**t) * rules[name].step(gradients)
                    continue
                mean = sum(gradients) / WORKERS
                m[name] = beta1 * m[name] + (1 - beta1) * mean
                v[name] = beta2 * v[name] + (1 - beta2) * mean**2
                corrected = v[name] / (1 - beta2**t)
                p -= lr / (1 - beta1**t) * m[name] / (corrected.sqrt() + eps)
                if t == START and p.dim() == 2:
                    rules[name] = take_over(name, corrected, m[name].clone())
        seen.append([p.detach().clone() for p in named.values()])
    return seen


def refreshed(v: Tensor, mean: Tensor, steps: int, number: int) -> Tensor:
    """v, its bias corrected, after as many of AdamW's steps with this mean; the refresh of that number, counted from 0."""
    beta2 = SETTINGS["betas"][1]
    learned = START + number * steps
    biased = beta2**steps * v * (1 - beta2**learned) + (1 - beta2**steps) * mean**2
    return biased / (1 - beta2 ** (learned + steps))
