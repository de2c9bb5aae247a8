"""Simulated workers are bit for bit the real ones: N gloo processes under DDP and tw.attach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.lanes import slow

STEPS = 8
SEED = 7
METHODS: dict[str, Any] = {
    "dense": tw.Dense(),
    "adtopk": tw.ADTopK(density=0.05, interleave=2, dense_fallback=False),
    "dgc": tw.DGC(density=0.05),
    "oktopk": tw.OkTopK(density=0.05, dense_fallback=False),
    "acpsgd": tw.ACPSGD(rank=2),
    "powersgd": tw.PowerSGD(rank=2, min_compression_rate=1.0),
    "hierarchical": tw.TopK(
        density=0.05, dense_fallback=False, exchange=tw.exchange.Hierarchical(per_host=2)
    ),
}


class SmallTransformer(nn.Module):
    """Two layers with dropout, an embedding and tied weights."""

    def __init__(self, vocabulary: int = 40, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)))[:, -1]


def make_model(kind: str) -> nn.Module:
    """The same on every call."""
    torch.manual_seed(SEED)
    if kind == "transformer":
        return SmallTransformer()
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 16, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    ).to(memory_format=torch.channels_last)


def make_batches(kind: str, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1000 + rank)
    while True:
        labels = torch.randint(0, 10, (6,), generator=generator)
        if kind == "transformer":
            yield torch.randint(0, 40, (6, 8), generator=generator), labels
        else:
            yield torch.randn(6, 1, 8, 8, generator=generator), labels


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def real_job(rank: int, world: int, kind: str, name: str, passes: int) -> tuple[Any, Any, int]:
    """(parameters and buffers, the handle's state, bytes sent) of one real worker."""
    model = make_model(kind)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = make_optimizer(model)
    handle = tw.attach(ddp, METHODS[name], optimizer=optimizer, deterministic=True)
    torch.manual_seed(SEED + rank)
    batches = make_batches(kind, rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with ddp.no_sync():
            for _ in range(passes - 1):
                loss_of(ddp, next(batches)).backward()
        loss_of(ddp, next(batches)).backward()
        optimizer.step()
    result = snapshot(model), handle.state_dict(), handle.stats().wire_bytes
    handle.close()
    return result


def simulated(
    world: int, kind: str, name: str, passes: int
) -> tuple[nn.Module, tw.Simulation, Tensor]:
    """Worker 0's buffers are those that count, so its forward runs in the middle of the others' here."""
    model = make_model(kind)
    optimizer = make_optimizer(model)
    sim = tw.simulate(model, METHODS[name], workers=world, optimizer=optimizer, deterministic=True)
    before = torch.get_rng_state()
    batches = [make_batches(kind, rank) for rank in range(world)]
    for _ in range(STEPS):
        for _ in range(passes):
            for rank in [*sim.ranks][::-1]:
                with sim.worker(rank):
                    loss_of(model, next(batches[rank])).backward()
        sim.exchange()
        optimizer.step()
    return model, sim, before


CASES = [
    *((2, "transformer", name, 1) for name in METHODS),
    *(slow(2, "cnn", name, 1) for name in METHODS),
    *(slow(4, "cnn", name, 1) for name in METHODS if name != "adtopk"),
    (4, "cnn", "adtopk", 1),
    slow(4, "transformer", "adtopk", 1),
    slow(4, "transformer", "acpsgd", 1),
    (2, "transformer", "adtopk", 3),
    (2, "cnn", "dgc", 2),
]


@pytest.mark.parametrize(("world", "kind", "name", "passes"), CASES)
def test_simulated_workers_are_the_real_ones_bit_for_bit(pools, world, kind, name, passes):
    real = pools(world).run(real_job, kind, name, passes)
    model, sim, before = simulated(world, kind, name, passes)
    assert torch.equal(before, torch.get_rng_state()), "the caller's random state was used"
    ours, theirs = snapshot(model), real[0][0]
    first = snapshot(make_model(kind))
    assert all(not torch.equal(ours[key], first[key]) for key in ours), "everything must move"
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), key
    for rank, (_, state, _) in enumerate(real):
        mine = sim.handles[rank].state_dict()["ranks"][f"rank{rank}"]
        saved = state["ranks"][f"rank{rank}"]
        assert mine["steps"] == saved["steps"]
        for store, held in saved["memory"].items():
            for parameter, value in held.items():
                assert torch.equal(mine["memory"][store][parameter], value), (store, parameter)
    sim.close()
