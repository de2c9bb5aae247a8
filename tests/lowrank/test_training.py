"""Short trainings that must end where dense training ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from tests.lanes import slow
from tests.lowrank.ranks import Ranks
from thinwire.layout import describe_module
from thinwire.methods.acpsgd import ACPSGD
from thinwire.methods.lowrank import LowRankMethod
from thinwire.methods.powersgd import PowerSGD
from thinwire.plan.policy import make_plan
from thinwire.recipes.data.digits import load
from thinwire.recipes.examples import Data, DataOptions

WORLD = 2


class Transformer(nn.Module):
    """One block over a few tokens; learns to add two digits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 32)
        self.place = nn.Parameter(torch.randn(3, 32) / 5)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 19)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens) + self.place)[:, 0])


def sums(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    digits = torch.randint(0, 10, (size, 2), generator=generator)
    tokens = torch.cat([torch.full((size, 1), 10), digits], 1)
    return tokens, digits.sum(1)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@functools.cache
def digits() -> Data:
    return load(DataOptions())


def some_digits(generator: torch.Generator, size: int) -> tuple[Tensor, ...]:
    chosen = torch.randint(0, len(digits().train), (size,), generator=generator)
    return digits().train.batch(chosen, None)


def fresh_digits() -> tuple[Tensor, ...]:
    return digits().test.batch(torch.arange(len(digits().test)), None)


@dataclass(frozen=True)
class Task:
    model: Callable[[], nn.Module]
    sample: Callable[[torch.Generator, int], tuple[Tensor, ...]]
    fresh: Callable[[], tuple[Tensor, ...]]
    """Inputs and labels to test with."""
    steps: int
    lr: float


def learn(method: LowRankMethod | None, task: Task) -> float:
    """Train on virtual ranks; the accuracy on fresh data."""
    torch.manual_seed(0)
    model = task.model()
    described = describe_module(model)
    ranks = None
    if method is not None:
        plan = make_plan([info for _, info in described.values()], method, [], WORLD)
        ranks = Ranks(method, [row.info for row in plan.values() if not row.dense], WORLD)
        assert len(ranks.infos) >= 3
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(task.steps):
        gradients = []
        for _ in range(WORLD):
            inputs, labels = task.sample(generator, 32)
            loss = nn.functional.cross_entropy(model(inputs), labels)
            found = torch.autograd.grad(loss, [p for p, _ in described.values()])
            gradients.append(dict(zip(described, found, strict=True)))
        update = {name: sum(g[name] for g in gradients) / WORLD for name in described}
        if ranks is not None:
            update |= ranks.step(gradients)[0]
        for name, (parameter, _) in described.items():
            parameter.grad = update[name]
        optimizer.step()
    inputs, labels = task.fresh()
    with torch.no_grad():
        return (model(inputs).argmax(1) == labels).float().mean().item()


TASKS = {
    "digits": Task(cnn, some_digits, fresh_digits, 150, 0.03),
    "transformer": Task(
        Transformer, sums, lambda: sums(torch.Generator().manual_seed(2), 1000), 220, 0.04
    ),
}


@pytest.fixture(scope="module")
def dense() -> dict[str, float]:
    return {name: learn(None, task) for name, task in TASKS.items()}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "method", [slow(PowerSGD(rank=4)), ACPSGD(rank=4)], ids=lambda m: type(m).__name__
)
def test_rank_4_learns_what_dense_learns(method, task, dense):
    assert dense[task] > 0.93
    assert learn(method, TASKS[task]) > dense[task] - 0.02
