"""AdamScale: what is saved, how a run goes on from it, and what the next step says if a part is missing."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.optim.adam_job import (
    EVERY_STEP,
    SETTINGS,
    START,
    batches,
    compute,
    in_scale,
    make_model,
    start,
    step_plain,
    train,
)
from thinwire.errors import UsageError


def saved(content: Any) -> Any:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COMBINATIONS = {
    "top-k, frozen": in_scale(tw.TopK(density=0.25, dense_fallback=False)),
    "top-k, refreshed, limited": in_scale(
        tw.TopK(density=0.25, dense_fallback=False), divisor=tw.memory.Refresh(every=2), limit=0.5
    ),
    "1 bit, refreshed, limited": in_scale(
        tw.Quantized(bits=1, dense_fallback=False), divisor=tw.memory.Refresh(every=2), limit=3.0
    ),
    "low rank, refreshed": in_scale(
        tw.PowerSGD(rank=2, dense_fallback=False), divisor=tw.memory.Refresh(every=2)
    ),
    "2 bits, frozen": in_scale(tw.Quantized(bits=2, dense_fallback=False)),
    "all-dimension, floor": in_scale(tw.ADTopK(density=0.25, dense_fallback=False), floor=0.1),
    "sampled, bf16": in_scale(
        tw.DGC(density=0.25, sample_ratio=0.5, dense_fallback=False), storage="bf16"
    ),
}


@pytest.mark.parametrize("stop", [1, START, START + 3])
@pytest.mark.parametrize("order", ["optimizer first", "handle first"])
@pytest.mark.parametrize("method", COMBINATIONS.values(), ids=COMBINATIONS)
def test_resume_is_bit_exact(method: tw.AdamScale, order: str, stop: int) -> None:
    model, optimizer, simulation = start(method)
    whole = train(optimizer, simulation, model, range(8))
    model, optimizer, simulation = start(method)
    train(optimizer, simulation, model, range(stop))
    states = saved((model.state_dict(), optimizer.state_dict(), simulation.state_dict()))
    model, optimizer, simulation = start(method)
    model.load_state_dict(states[0])
    if order == "optimizer first":
        optimizer.load_state_dict(states[1])
    simulation.load_state_dict(states[2])
    if order == "handle first":
        optimizer.load_state_dict(states[1])
    rest = train(optimizer, simulation, model, range(stop, 8))
    for a, b in zip(whole[-1], rest[-1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("stop", [4, 6, 9])
def test_a_dense_start_that_is_watched_ends_where_it_would_have(stop: int) -> None:
    """What was seen of the second moments before the stop counts, so that the same step is the first compressed one."""
    method = in_scale(start=tw.Settled(tolerance=0.9, steps=5, at_least=5))
    model, optimizer, simulation = start(method)
    whole = train(optimizer, simulation, model, range(14))
    assert not simulation.plan()["0.weight"].dense
    model, optimizer, simulation = start(method)
    train(optimizer, simulation, model, range(stop))
    assert simulation.plan()["0.weight"].dense
    states = saved((model.state_dict(), optimizer.state_dict(), simulation.state_dict()))
    model, optimizer, simulation = start(method)
    for part, state in zip((model, optimizer, simulation), states, strict=True):
        part.load_state_dict(state)
    rest = train(optimizer, simulation, model, range(stop, 14))
    for a, b in zip(whole[-1], rest[-1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("stop", [1, START, START + 2])
@pytest.mark.parametrize("order", ["optimizer first", "handle first"])
@pytest.mark.parametrize("method", COMBINATIONS.values(), ids=COMBINATIONS)
def test_going_back_in_one_process_is_bit_exact(
    method: tw.AdamScale, order: str, stop: int
) -> None:
    """To a step of the dense start too, which has ended in between."""
    model, optimizer, simulation = start(method)
    train(optimizer, simulation, model, range(stop))
    states = saved((model.state_dict(), optimizer.state_dict(), simulation.state_dict()))
    first = train(optimizer, simulation, model, range(stop, 8))
    model.load_state_dict(states[0])
    if order == "optimizer first":
        optimizer.load_state_dict(states[1])
    simulation.load_state_dict(states[2])
    if order == "handle first":
        optimizer.load_state_dict(states[1])
    again = train(optimizer, simulation, model, range(stop, 8))
    for ours, theirs in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_saved_optimizer_is_plain_adamws() -> None:
    """Its second moment goes on where it was; momentum starts anew."""
    model, optimizer, simulation = start(in_scale(divisor=EVERY_STEP))
    train(optimizer, simulation, model, range(6))
    plain = make_model()
    adamw = torch.optim.AdamW(plain.parameters(), lr=0.05, **SETTINGS)
    reference = make_model()
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.05, **SETTINGS)
    for step in range(6):
        step_plain(reference, theirs, step)
    adamw.load_state_dict(saved(optimizer.state_dict()))
    for mine, other in zip(plain.parameters(), reference.parameters(), strict=True):
        assert set(adamw.state[mine]) == set(theirs.state[other])
        assert adamw.state[mine]["step"] == 6
        torch.testing.assert_close(
            adamw.state[mine]["exp_avg_sq"], theirs.state[other]["exp_avg_sq"], rtol=1e-4, atol=1e-9
        )
    plain.load_state_dict(model.state_dict())
    for x, y in batches(7):
        compute(plain)(x, y).backward()
    adamw.step()


def test_the_state_of_another_kind_of_optimizer_is_refused() -> None:
    model, optimizer, _ = start(in_scale())
    state = torch.optim.SGD(model.parameters(), lr=0.1).state_dict()
    with pytest.raises(UsageError, match="betas is None in the saved optimizer"):
        optimizer.load_state_dict(state)


def test_other_betas_are_refused_when_loading() -> None:
    _, optimizer, _ = start(in_scale())
    other = torch.optim.AdamW(make_model().parameters(), betas=(0.5, 0.9))
    with pytest.raises(UsageError, match="load it before attach"):
        optimizer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("change", ["mean", "reset"])
def test_another_world_goes_on(change: str) -> None:
    method = COMBINATIONS["top-k, refreshed, limited"]
    model, optimizer, simulation = start(method)
    train(optimizer, simulation, model, range(6))
    states = saved((model.state_dict(), optimizer.state_dict(), simulation.state_dict()))
    model = make_model()
    model.load_state_dict(states[0])
    fresh = torch.optim.AdamW(model.parameters(), lr=0.05, **SETTINGS)
    two = tw.simulate(model, method, workers=2, optimizer=fresh)
    fresh.load_state_dict(states[1])
    two.load_state_dict(states[2], on_world_change=change)
    for rank in two.ranks:
        held = two.residual("0.weight", rank)
        assert bool(held.any()) == (change == "mean")
        assert torch.equal(held, two.residual("0.weight", 0))
    for step in range(3):
        two.step(compute(model), batches(step)[:2])
        fresh.step()
    assert all(p.isfinite().all() for p in model.parameters())
    assert not two.plan()["0.weight"].dense


def test_without_the_optimizers_state_the_next_step_says_so() -> None:
    method = COMBINATIONS["top-k, frozen"]
    model, optimizer, simulation = start(method)
    train(optimizer, simulation, model, range(6))
    state = saved(simulation.state_dict())
    _, _, two = start(method)
    for rank in state["ranks"].values():
        rank["memory"].pop("second_moment")
    two.load_state_dict(state)
    with pytest.raises(UsageError, match="second moment"):
        two.step(compute(two.model), batches(0))
