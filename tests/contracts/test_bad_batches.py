"""A bad batch costs its own step, as it does without compression: every method skips as often as plain averaging."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.contracts.adapters import ADAPTERS, make
from tests.lanes import slow
from thinwire.methods.base import Method

WORKERS = 3
STEPS = 40
BAD = (12, 13, 27)
SPARSE = {"density": 0.1, "dense_fallback": False}
METHODS: dict[str, Method] = {
    "Dense": tw.Dense(),
    "ADTopK": tw.ADTopK(**SPARSE),
    "TopK": tw.TopK(**SPARSE),
    "TopK, memory in int8": tw.TopK(memory=tw.memory.Residual(storage="int8"), **SPARSE),
    "DGC": tw.DGC(**SPARSE),
    "OkTopK": tw.OkTopK(**SPARSE),
    "OkTopK, published": tw.OkTopK(thresholds="published", **SPARSE),
    "GTopK": tw.GTopK(**SPARSE),
    "ExclusiveTopK": tw.ExclusiveTopK(**SPARSE),
    "TopKDSA": tw.TopKDSA(**SPARSE),
    "ADTopK, thresholds": tw.ADTopK(
        interleave=2, threshold=True, monitor=tw.select.Monitor(warmup=2), **SPARSE
    ),
    "ACPSGD": tw.ACPSGD(rank=2, dense_fallback=False),
    "PowerSGD": tw.PowerSGD(rank=2, dense_fallback=False),
    "SignSGD": tw.SignSGD(memory=tw.memory.Residual()),
    "Quantized": tw.Quantized(bits=4, dense_fallback=False),
}
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24))


class Rule:
    """Skip a step whose update is many times longer than usual; the same on all ranks, because the update is."""

    def __init__(self) -> None:
        self.usual: list[float] = []

    def refuses(self, model: nn.Module) -> bool:
        norm = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        refused = len(self.usual) > 4 and not norm < 50 * sorted(self.usual)[len(self.usual) // 2]
        if not refused:
            self.usual.append(norm)
        return refused


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 24, generator=generator)


@each_method
def test_a_gradient_a_thousand_times_too_large_costs_one_step(method: Method):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    options = {"workers": WORKERS, "optimizer": optimizer, "skippable": True}
    simulation = tw.simulate(model, method, **options)
    rule, skipped = Rule(), []
    for step in range(STEPS):
        for rank in simulation.ranks:
            with simulation.worker(rank):
                x = batch(step, rank)
                loss = (model(x) - x.flip(1)).square().mean()
                (loss * (1000 if step in BAD and rank == 1 else 1)).backward()
        simulation.exchange()
        if rule.refuses(model):
            skipped.append(step)
            simulation.discard_step()
        else:
            optimizer.step()
    assert skipped == list(BAD)
    assert all(p.isfinite().all() for p in model.parameters())


@each_method
@pytest.mark.parametrize("poison", [math.inf, 3e38])
def test_an_infinity_beside_huge_numbers_costs_a_scaler_one_step(method: Method, poison: float):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
    options = {"workers": WORKERS, "optimizer": optimizer, "grad_scaler": scaler}
    simulation = tw.simulate(model, method, **options)
    applied: list[int] = []
    optimizer.register_step_post_hook(lambda *_: applied.append(step))
    for step in range(STEPS):
        for rank in simulation.ranks:
            with simulation.worker(rank):
                x = batch(step, rank)
                loss = (model(x) - x.flip(1)).square().mean()
                if step in BAD and rank == 1:
                    loss = 1e6 * loss + poison * model[2].weight[0, 0] + poison * model[0].bias[1]
                scaler.scale(loss).backward()
        simulation.exchange()
        scaler.step(optimizer)
        scaler.update()
    assert applied == [step for step in range(STEPS) if step not in BAD]
    assert all(p.isfinite().all() for p in model.parameters())


def skipping_job(rank: int, world: int, adapter: str, method: Method) -> tuple:
    """The same on real ranks; the skipped steps again without their gradients must end in the same parameters."""
    ends = []
    for bad in (True, False):
        model = make_model()
        plain = torch.optim.SGD(model.parameters(), lr=0.02)
        options = {"skippable": True, "deterministic": True, "bucket_kb": 2.0}
        module, optimizer, handle = make(adapter, model, plain, method, **options)
        for step in range(20):
            if step in BAD and not bad:
                continue
            x = batch(step, rank)
            optimizer.zero_grad()
            factor = 1000 if step in BAD and rank == 1 else 1
            (factor * (module(x) - x.flip(1)).square().mean()).backward()
            if step in BAD:
                handle.discard_step()
            else:
                optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()])
        ends.append([handle.residual(name) for name, _ in model.named_parameters()])
        handle.close()
    return tuple(ends)


# Each method under one adapter, the adapters in turn.
@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        (name, adapter) if number % 2 == ADAPTERS.index(adapter) else slow(name, adapter)
        for number, name in enumerate(["ADTopK", "OkTopK", "GTopK", "PowerSGD", "Quantized"])
        for adapter in ADAPTERS
    ],
)
def test_training_goes_on_as_if_skipped_steps_had_never_been(pools, adapter, name):
    for with_bad, held, without, other in pools(2).run(skipping_job, adapter, METHODS[name]):
        for left, right in zip([*with_bad, *held], [*without, *other], strict=True):
            assert torch.equal(left, right)


def test_discarding_needs_memory_that_can_be_restored():
    simulation = tw.simulate(make_model(), METHODS["ADTopK"], workers=2)
    with pytest.raises(tw.UsageError, match=r"skippable is False.*skippable=True.*skipped='keep'"):
        simulation.discard_step()
    simulation = tw.simulate(make_model(), METHODS["ADTopK"], workers=2, skipped="keep")
    simulation.discard_step()


@pytest.mark.parametrize(("field", "value"), [("skippable", "yes"), ("skipped", "return")])
def test_settings_are_checked(field, value):
    with pytest.raises(tw.UsageError, match=f"{field} is {value!r}"):
        tw.simulate(make_model(), METHODS["ADTopK"], workers=2, **{field: value})


@pytest.mark.parametrize(("storage", "per_element"), [("fp32", 4), ("bf16", 2), ("int8", 1)])
def test_the_plan_shows_what_skipping_takes(storage, per_element):
    memory = tw.memory.Residual(storage=storage)
    method = tw.TopK(memory=memory, **SPARSE)
    held = sum(p.numel() for p in make_model().parameters() if p.dim() > 1) * per_element
    for options, copies in (({}, 1), ({"skipped": "keep"}, 1), ({"skippable": True}, 2)):
        simulation = tw.simulate(make_model(), method, workers=2, **options)
        plan = simulation.plan()
        assert plan.memory_bytes == pytest.approx(held, rel=0.02)
        assert plan.spare_bytes == (copies - 1) * plan.memory_bytes
        assert bool(re.search("so that steps can be skipped", str(plan))) == (copies == 2)
        for rank in simulation.ranks:
            with simulation.worker(rank):
                simulation.model(batch(0, rank)).square().mean().backward()
        simulation.exchange()
        assert simulation.stats().memory_bytes == pytest.approx(copies * held, rel=0.1)
