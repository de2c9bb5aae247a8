"""AdamScale: how the dense start ends, and how the second moment returns to the optimizer at the end."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.optim.adam_job import (
    EVERY_STEP,
    SETTINGS,
    START,
    WORKERS,
    batches,
    check_close,
    compute,
    in_scale,
    make_model,
    start,
    step_plain,
    train,
    train_plain,
)
from thinwire.errors import UsageError
from thinwire.exchange.requests import Place
from thinwire.optim.adam_step import step_of
from thinwire.optim.settling import SettlingWatch, measure_moments


def test_a_trained_optimizer_may_start_at_once() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **SETTINGS)
    for step in range(START):
        step_plain(model, optimizer, step)
    method = in_scale(start=0, divisor=EVERY_STEP)
    simulation = tw.simulate(model, method, workers=WORKERS, optimizer=optimizer)
    ours = train(optimizer, simulation, model, range(START, 9))
    check_close(ours[-1:], train_plain(9)[-1:], 1e-4)


class HalfUsed(nn.Module):
    """One of two layers is used in the beginning."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(8, 4), nn.Linear(8, 4)
        self.both = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) + self.unused(x) if self.both else self.used(x)


@pytest.mark.parametrize("rule", [0, tw.Settled(steps=2, at_least=2, tolerance=1e6)])
def test_a_parameter_without_a_step_so_far_gets_a_usable_divisor(rule: int | tw.Settled) -> None:
    """The saved optimizer has moments of 0 for it, whose bias cannot be corrected."""
    model = HalfUsed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **SETTINGS)
    simulation = tw.simulate(model, in_scale(), workers=WORKERS, optimizer=optimizer)
    train(optimizer, simulation, model, range(6))
    again = HalfUsed()
    adamw = torch.optim.AdamW(again.parameters(), lr=0.05, **SETTINGS)
    adamw.load_state_dict(optimizer.state_dict())
    simulation = tw.simulate(again, in_scale(start=rule), workers=WORKERS, optimizer=adamw)
    train(adamw, simulation, again, range(6, 10))
    assert not simulation.plan()["unused.weight"].dense
    again.both = True
    train(adamw, simulation, again, range(10, 13))
    assert all(p.isfinite().all() for p in again.parameters())


def test_the_dense_start_ends_when_the_second_moment_has_settled() -> None:
    rule = tw.Settled(tolerance=0.5, steps=4, at_least=4)
    model, optimizer, simulation = start(in_scale(start=rule))
    turned = []
    for step in range(60):
        train(optimizer, simulation, model, range(step, step + 1))
        turned.append(not simulation.plan()["0.weight"].dense)
    assert turned[-1] and not any(turned[:7])


def first_compressed(optimizer, simulation, model, steps: range) -> int | None:
    """The step before which the dense start ended."""
    for step in steps:
        if not simulation.plan()["0.weight"].dense:
            return step
        train(optimizer, simulation, model, range(step, step + 1))
    return None


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_the_usual_rule_ends_the_dense_start(beta2: float, caplog) -> None:
    options = {"betas": (0.9, beta2), "lr": 0.003}
    model, optimizer, simulation = start(in_scale(start=tw.Settled()), options=options)
    assert first_compressed(optimizer, simulation, model, range(500)) in range(100, 500)
    assert not [one for one in caplog.records if "not settled" in one.message]


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_an_optimizer_that_has_learned_is_only_watched(beta2: float) -> None:
    """Its moments are corrected by its own steps, not by the handle's."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, betas=(0.9, beta2))
    for step in range(200):
        step_plain(model, optimizer, step)
    method = in_scale(start=tw.Settled())
    simulation = tw.simulate(model, method, workers=WORKERS, optimizer=optimizer)
    assert first_compressed(optimizer, simulation, model, range(200)) in (100, 150)


def test_what_stays_dense_need_not_settle() -> None:
    model = nn.ModuleList([nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    method = in_scale(start=tw.Settled(steps=10, at_least=20))
    rules = [tw.rule("1.weight", dense=True)]
    simulation = tw.simulate(model, method, workers=1, optimizer=optimizer, policy=rules)
    for step in range(20):
        simulation.step(lambda x: (model[0].weight + 2**x * model[1].weight).sum(), [(step,)])
        optimizer.step()
    assert not simulation.plan()["0.weight"].dense


def test_the_dense_start_ends_at_the_latest_with_a_warning(caplog) -> None:
    rule = tw.Settled(tolerance=1e-9, steps=4, at_least=4, at_most=21)
    model, optimizer, simulation = start(in_scale(start=rule))
    assert first_compressed(optimizer, simulation, model, range(40)) == 21
    assert len([one for one in caplog.records if "not settled" in one.message]) == 1
    with pytest.raises(UsageError, match="at_most is 3"):
        tw.Settled(at_least=4, at_most=3)


def test_a_worker_that_came_a_moment_ago_takes_part_in_the_agreement() -> None:
    """Windows of 13 steps, which are looked at in every second: it has seen nothing before the last of them."""
    driver = Mock(place=Place(1, 2))
    driver.run.return_value = torch.tensor(1.0)
    rule = tw.Settled(steps=13, at_least=13)
    assert not SettlingWatch().has_settled(rule, lambda: torch.ones(3), 13, driver)
    driver.run.assert_called_once()


def test_what_is_agreed_on_lies_where_the_gradients_are() -> None:
    """Also where nothing is compressed: some groups of ranks take no tensors of the CPU."""
    assert measure_moments([], 0.9, torch.device("meta")).device.type == "meta"


@pytest.mark.parametrize("place", ["capturable", "fused"])
def test_a_counter_begins_where_adam_wants_it(place: str) -> None:
    parameter = torch.empty(3, device="meta")
    settings = {"capturable": False, "fused": None}
    assert step_of(parameter, {}, settings).device.type == "cpu"
    assert step_of(parameter, {}, {**settings, place: True}).device.type == "meta"


def test_the_first_refresh_comes_late() -> None:
    """What the dense start has just taught is used before it is mixed with a single mean."""
    model, optimizer, simulation = start(in_scale(divisor=tw.memory.Refresh(every=3)))
    train(optimizer, simulation, model, range(START))
    held = simulation.handles[0].reducer.assignments.held
    before, changed = held("0.weight", "second_moment"), []
    for step in range(START, START + 7):
        train(optimizer, simulation, model, range(step, step + 1))
        now = held("0.weight", "second_moment")
        changed.append(not torch.equal(now, before))
        before = now
    assert changed == [False, False, True, False, False, True, False]


def test_switching_to_dense_sends_what_is_held_and_is_adamw_again() -> None:
    """The step that sends what is held has no refresh, so that the second moment misses one square."""
    model, optimizer, simulation = start(in_scale(divisor=EVERY_STEP))
    plain = make_model()
    adamw = torch.optim.AdamW(plain.parameters(), lr=0.05, **SETTINGS)
    for step in range(7):
        if step == 6:
            simulation.switch(tw.Dense())
        train(optimizer, simulation, model, range(step, step + 1))
        step_plain(plain, adamw, step)
    ours, theirs = optimizer.state[model[0].weight], adamw.state[plain[0].weight]
    torch.testing.assert_close(ours["exp_avg"], theirs["exp_avg"], rtol=1e-3, atol=1e-6)
    assert int(ours["step"]) == 7
    train(optimizer, simulation, model, range(7, 9))
    assert simulation.plan()["0.weight"].dense
    assert not simulation.handles[0].stats().memory_bytes
    simulation.switch(in_scale(divisor=EVERY_STEP))
    train(optimizer, simulation, model, range(9, 12))
    assert not simulation.plan()["0.weight"].dense
    assert all(p.isfinite().all() for p in model.parameters())
    simulation.switch(tw.Quantized(bits=8))
    train(optimizer, simulation, model, range(12, 14))
    # A method that leaves Adam alone: it is the optimizer's again, momentum and all.
    state = optimizer.state[model[0].weight]
    assert state["exp_avg"].any() and state["exp_avg_sq"].any() and int(state["step"]) == 14
    assert simulation.handles[0].steering.takeover is None
    simulation.close()
    assert state["exp_avg"].any()


def test_a_skipped_step_does_not_lose_the_second_moment_of_what_turns_dense() -> None:
    model, optimizer, simulation = start(in_scale(divisor=EVERY_STEP))
    train(optimizer, simulation, model, range(6))
    simulation.switch(tw.Dense())
    simulation.step(compute(model), batches(6))
    train(optimizer, simulation, model, range(7, 9))
    assert optimizer.state[model[0].weight]["exp_avg_sq"].all()


def test_closing_gives_the_second_moment_back() -> None:
    model, optimizer, simulation = start(in_scale(divisor=EVERY_STEP))
    train(optimizer, simulation, model, range(6))
    held = simulation.handles[0].reducer.assignments.held("0.weight", "second_moment")
    simulation.close()
    state = optimizer.state[model[0].weight]
    torch.testing.assert_close(state["exp_avg_sq"] / (1 - 0.95**6), held)
    assert not state["exp_avg"].any()
    compute(model)(*batches(0)[0]).backward()
    optimizer.step()


def test_rare_rows_are_limited_by_the_floor() -> None:
    """A word that first comes up after the dense start moves by about a learning rate, not by thousands."""
    for floor, wild in ((0.0, True), (0.01, False)):
        torch.manual_seed(0)
        words = nn.Embedding(64, 32)
        optimizer = torch.optim.AdamW(words.parameters(), lr=0.01)
        method = in_scale(start=2, floor=floor)
        simulation = tw.simulate(words, method, workers=1, optimizer=optimizer)
        for step in range(3):
            before = words.weight.detach().clone()
            seen = torch.tensor([0, 1, 2] if step < 2 else [5])
            simulation.step(lambda x: words(x).sum(), [(seen,)])  # noqa: B023
            optimizer.step()
        assert ((words.weight.detach() - before).abs().max() > 1.0) == wild


def after_dense(method: tw.Method) -> tw.Timeline:
    return tw.Timeline(phases=((0, tw.Dense()), (5, method)))


@pytest.mark.parametrize("method", [tw.TopK(density=0.01), after_dense(tw.TopK(density=0.01))])
def test_plain_top_k_with_adam_warns_once_with_the_remedy(method: tw.Method, caplog) -> None:
    model = make_model()
    tw.simulate(model, method, workers=2, optimizer=torch.optim.AdamW(model.parameters()))
    assert len([one for one in caplog.records if "tw.AdamScale" in one.message]) == 1
    caplog.clear()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    tw.simulate(model, method, workers=2, optimizer=sgd)
    assert not [one for one in caplog.records if "AdamScale" in one.message]


QUIET = [
    tw.Dense(),
    tw.Quantized(bits=4),
    after_dense(tw.Quantized(bits=4)),
    tw.AdamScale(method=tw.TopK(density=0.01)),
]


@pytest.mark.parametrize("method", QUIET, ids=lambda method: type(method).__name__)
def test_what_adam_can_step_behind_warns_of_nothing(method: tw.Method, caplog) -> None:
    model = make_model()
    tw.simulate(model, method, workers=2, optimizer=torch.optim.AdamW(model.parameters()))
    assert not [one for one in caplog.records if "AdamScale" in one.message]
