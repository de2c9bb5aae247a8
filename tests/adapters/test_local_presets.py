"""Published ways to take local steps: settings as in the papers, plain re-computations, and losses that fall in real groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.local_jobs import (
    EXACT,
    WORKERS,
    adamw,
    inner_step,
    make_models,
    mean_in_rank_order,
    run,
    sgd,
    values,
)

NESTEROV = {"momentum": 0.9, "nesterov": True}
PUBLISHED = {
    "DiLoCo": ({"every": 500, "fragments": 1, "delay": 0}, {"lr": 0.7, **NESTEROV}, "Dense"),
    "StreamingDiLoCo": (
        {"every": 100, "fragments": 4, "delay": 5, "keep_local": 0.5},
        {"lr": 0.4, **NESTEROV},
        "Quantized",
    ),
    "SparseLoCo": (
        {"every": 30, "fragments": 1, "delay": 0},
        {"lr": 1.0, "momentum": 0, "nesterov": False},
        "Compose",
    ),
}
SHORT = {
    "DiLoCo": {"every": 8},
    "StreamingDiLoCo": {"every": 8, "delay": 1},
    "SparseLoCo": {"every": 8},
}


def train_preset(rank, world, name):
    """A task that one model can learn, each rank's data its own: (settings, losses of the common point, the end)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    teacher = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    published = getattr(tw, name)(model, optimizer)
    group = published.outer.param_groups[0]
    outer = {key: group[key] for key in ("lr", "momentum", "nesterov")}
    (sent,) = {type(row.method).__name__ for row in published.plan() if not row.dense} or {"Dense"}
    settings = {key: getattr(published.settings, key) for key in PUBLISHED[name][0]}
    published.close()
    local = getattr(tw, name)(model, optimizer, **SHORT[name])
    held_out = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    losses = []
    for step in range(48):
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        (model(inputs) - teacher(inputs)).square().mean().backward()
        optimizer.step()
        if step % 16 == 0:
            with torch.no_grad():
                losses.append(float((model(held_out) - teacher(held_out)).square().mean()))
    local.finish()
    with torch.no_grad():
        losses.append(float((model(held_out) - teacher(held_out)).square().mean()))
    found, bytes_sent = values(model), local.stats().wire_bytes
    local.close()
    return settings, outer, sent, losses, found, bytes_sent


@pytest.mark.workers
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_as_published_and_learns(pools, name):
    results = pools(2).run(train_preset, name)
    for settings, outer, sent, losses, found, bytes_sent in results:
        assert (settings, outer, sent) == PUBLISHED[name]
        assert losses[-1] < 0.7 * losses[0], losses
        assert torch.equal(found, results[0][4]) and bytes_sent > 0


def train_sparse_loco(rank, world, rounds):
    torch.manual_seed(0)
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    local = tw.SparseLoCo(model, optimizer, every=2)
    found = []
    for step in range(2 * rounds):
        step_towards_one(model, optimizer, rank, step)
        if step % 2:
            found.append((model.weight.detach().clone(), local.handle.residual("weight").clone()))
    local.close()
    return found


def step_towards_one(model, optimizer, rank, step):
    inputs = torch.randn(16, 256, generator=torch.Generator().manual_seed(100 * step + rank))
    optimizer.zero_grad()
    (model(inputs) - 1).square().mean().backward()
    optimizer.step()


def sparse_loco_sends(held: torch.Tensor) -> torch.Tensor:
    """The 64 largest of every 4096, as a sign times one or two scales of their own."""
    chunks = held.view(-1, 4096)
    places = chunks.abs().topk(64, 1).indices
    chosen = chunks.gather(1, places)
    # A bfloat16, cut off: half of the largest.
    scale = chosen.abs().amax(1, keepdim=True) / 2
    scale = (scale.view(torch.int32) & -65536).view(torch.float32)
    coded = torch.where(chosen.abs() >= 1.5 * scale, 2 * scale, scale) * chosen.sign()
    return torch.zeros_like(chunks).scatter_(1, places, coded).view_as(held)


@pytest.mark.workers
def test_sparse_loco_is_its_recomputation(pools):
    rounds = 4
    results = pools(2).run(train_sparse_loco, rounds)
    torch.manual_seed(0)
    models = [nn.Linear(256, 256, bias=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    point = models[0].weight.detach().clone()
    held = [torch.zeros_like(point) for _ in models]
    for number in range(rounds):
        total = torch.zeros_like(point)
        for rank, model in enumerate(models):
            for step in (2 * number, 2 * number + 1):
                step_towards_one(model, optimizers[rank], rank, step)
            together = 0.95 * held[rank] + (point - model.weight.detach())
            sent = sparse_loco_sends(together)
            held[rank] = together - sent
            total += sent
        point = point - total / 2
        with torch.no_grad():
            for model in models:
                model.weight.copy_(point)
        for rank, result in enumerate(results):
            found, kept = result[number]
            torch.testing.assert_close(found, point, rtol=0, atol=1e-8)
            torch.testing.assert_close(kept, held[rank], rtol=0, atol=1e-8)


def test_streaming_diloco_is_its_recomputation():
    """Fragments in turn, two steps on their way, half of each place kept; sent whole."""
    models = make_models()
    optimizers = [adamw(model) for model in models]
    outer = {"lr": 0.4, **NESTEROV}
    sim = tw.LocalSteps.simulate(
        models, optimizers, EXACT, every=6, fragments=2, delay=2, keep_local=0.5, outer=outer
    )
    run(sim, models, optimizers, 18)

    plain = make_models()
    plain_optimizers = [adamw(model) for model in plain]
    points = [p.detach().clone() for p in plain[0].parameters()]
    velocities: list[torch.Tensor | None] = [None] * len(points)
    turns = [list(range(1)), list(range(1, 4))]
    travelling: dict[int, list[torch.Tensor]] = {}
    for step in range(1, 19):
        for rank in range(WORKERS):
            inner_step(plain[rank], plain_optimizers[rank], rank, step - 1)
        if step % 3 == 0:
            for index in turns[step // 3 % 2 - 1]:
                ways = [points[index] - list(model.parameters())[index].detach() for model in plain]
                travelling[index] = mean_in_rank_order(ways)
        elif step % 3 == 2 and step > 3:
            for index, gradient in travelling.items():
                before = velocities[index]
                velocity = gradient.clone() if before is None else 0.9 * before + gradient
                velocities[index] = velocity
                points[index] = points[index] - 0.4 * (gradient + 0.9 * velocity)
                for model in plain:
                    local = list(model.parameters())[index].detach()
                    local.copy_(0.5 * local + 0.5 * points[index])
            travelling.clear()
    for model, other in zip(models, plain, strict=True):
        torch.testing.assert_close(values(model), values(other), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [EXACT, tw.Quantized(bits=4)], ids=["dense", "int4"])
def test_a_common_point_that_is_put_somewhere_changes_nothing(method):
    ends = []
    for settings in ({}, {"point_device": "cpu"}, {"point_device": torch.device("cpu")}):
        models = make_models()
        optimizers = [sgd(model) for model in models]
        sim = tw.LocalSteps.simulate(models, optimizers, method, every=2, fragments=2, **settings)
        run(sim, models, optimizers, 6)
        assert all(t.device.type == "cpu" for t in sim.workers[0].point.tensors.values())
        ends.append(values(models[0]))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])
