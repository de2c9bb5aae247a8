"""Momentum changes hands in mid-training: the weights are those of an optimizer that kept it all the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.auto.linear import LinearJob, expected, make_learned
from tests.auto.workers import Brake, Job, Model, auto
from tests.pool import Pool
from thinwire.errors import UsageError

WHOLE = [tw.rule("*", dense=True)]


def changing_hands(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    plain, changing = (Job(rank, tw.Dense(), width=16) for _ in range(2))
    plain.run(13)
    seen = []
    for method in (tw.DGC(density=1.0), tw.TopK(density=0.01), tw.DGC(density=1.0), tw.Dense()):
        changing.handle.switch(method, policy=WHOLE)
        changing.run(3)
        seen.append(changing.optimizer.param_groups[0]["momentum"])
    changing.run(1)
    return plain.weights(), changing.weights(), seen


def test_an_optimizer_goes_on_from_momentum_that_it_gets_back(
    pools: Callable[[int], Pool],
) -> None:
    for plain, changing, seen in pools(2).run(changing_hands):
        torch.testing.assert_close(changing, plain, rtol=1e-5, atol=1e-6)
        # Under DGC it is the handle's; a plain mean leaves it where it is.
        assert seen == [0.0, 0.9, 0.0, 0.0]


ONE_BIT = tw.AdamScale(method=tw.Quantized(bits=1), start=1, limit=3.0)
TOP = tw.AdamScale(method=tw.TopK(density=0.05), start=1, divisor=tw.memory.Refresh(every=4))


def side_by_side(rank: int, world: int) -> list[tuple[torch.Tensor, torch.Tensor, bool]]:
    """Several forms in Adam's scale for different parameters, most of it dense or not, and plain methods between them."""
    job = LinearJob(rank, tw.Quantized(bits=8), adam=True)
    seen = []
    for method, policy in (
        (tw.Quantized(bits=8), []),
        (tw.Dense(), [tw.rule("layers.1", method=ONE_BIT)]),
        (TOP, [tw.rule("layers.1", method=ONE_BIT), tw.rule("layers.3", dense=True)]),
        (tw.Quantized(bits=4), []),
        (ONE_BIT, [tw.rule("layers.0", method=TOP)]),
        (tw.Dense(), []),
    ):
        job.handle.switch(method, policy=policy)
        for _ in range(4):
            job.step()
        seen.append((job.weights(), job.displacement(), job.handle.steering.takeover is not None))
    return seen


def test_forms_in_adams_scale_work_side_by_side(pools: Callable[[int], Pool]) -> None:
    results = pools(2).run(side_by_side)
    for phase, ((first, mine, _), (second, other, _)) in enumerate(zip(*results, strict=True)):
        assert torch.equal(first, second)
        wanted = expected(2, 4 * (phase + 1), adam=True)
        assert float(((mine + other) / 2 - wanted).abs().sum() / wanted.abs().sum()) < 1e-5
    # A plain mean leaves Adam's step where it is.
    assert [owned for _, _, owned in results[0]] == [False, True, True, False, True, True]


def moved_in_between(
    rank: int, world: int, first: tw.Method, then: tw.Method
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """To another group of the same ranks, before the dense step in which momentum is to change hands."""
    job = LinearJob(rank, first)
    job.step()
    job.handle.switch(then)
    group = dist.new_group(list(range(world)))
    job.ddp = DistributedDataParallel(job.model, process_group=group, bucket_cap_mb=0.01)
    job.handle.regroup(model=job.ddp)
    for _ in range(3):
        job.step()
    return job.weights(), job.displacement(), job.handle.steering.takeover is not None


@pytest.mark.parametrize("owned", [True, False])
def test_a_switch_under_way_moves_along(pools: Callable[[int], Pool], owned: bool) -> None:
    kept = tw.DGC(density=0.1, memory=tw.memory.MomentumCorrection(masking=False))
    methods = (tw.TopK(density=0.1), kept) if owned else (kept, tw.TopK(density=0.1))
    (first, mine, taken), (second, other, _) = pools(2).run(moved_in_between, *methods)
    assert torch.equal(first, second) and taken == owned
    wanted = expected(2, 4)
    assert float(((mine + other) / 2 - wanted).abs().sum() / wanted.abs().sum()) < 1e-5


def loaded_in_between(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """A state is loaded before the dense step in which Adam's step is to change hands."""
    job = LinearJob(rank, TOP, adam=True)
    for _ in range(4):
        job.step()
    optimizer, handle = deepcopy((job.optimizer.state_dict(), job.handle.state_dict()))
    job.handle.switch(tw.Quantized(bits=8))
    job.optimizer.load_state_dict(optimizer)
    job.handle.load_state_dict(handle)
    for _ in range(3):
        job.step()
    return job.weights(), job.displacement(), job.handle.steering.takeover is not None


def test_a_switch_under_way_outlives_a_load(pools: Callable[[int], Pool]) -> None:
    (first, mine, taken), (second, other, _) = pools(2).run(loaded_in_between)
    assert torch.equal(first, second) and not taken
    wanted = expected(2, 7, adam=True)
    assert float(((mine + other) / 2 - wanted).abs().sum() / wanted.abs().sum()) < 1e-5


def begin_to_choose(rank: int, world: int, adam: bool) -> tuple[torch.Tensor, torch.Tensor, str]:
    """From a method that does a part of the optimizer's work to Auto, which begins dense."""
    kept = tw.DGC(density=0.05, memory=tw.memory.MomentumCorrection(masking=False))
    job = LinearJob(rank, TOP if adam else kept, adam=adam)
    for _ in range(4):
        job.step()
    job.handle.switch(auto(measure_steps=100))
    for _ in range(3):
        job.step()
    return job.displacement(), job.weights(), job.pilot.phase


@pytest.mark.parametrize("adam", [False, True])
def test_auto_follows_a_method_that_owns_momentum(pools: Callable[[int], Pool], adam: bool) -> None:
    moved, weights, phases = zip(*pools(2).run(begin_to_choose, adam), strict=True)
    wanted = expected(2, 7, adam=adam)
    assert float((torch.stack(moved).mean(0) - wanted).abs().sum() / wanted.abs().sum()) < 1e-5
    assert torch.equal(weights[0], weights[1]) and phases == ("measuring", "measuring")


def test_what_cannot_be_taken_over_is_refused_at_once(pools: Callable[[int], Pool]) -> None:
    for message in pools(2).run(refused):
        assert "DGC can take momentum over from torch.optim.SGD" in message


def refused(rank: int, world: int) -> str:
    job = LinearJob(rank, tw.Auto(), adam=True)
    try:
        job.handle.switch(tw.DGC())
    except UsageError as error:
        job.step()
        # Who steered before still does.
        assert job.pilot.begin_step in job.handle.reducer.before_step
        return str(error)
    return ""


def cycled(rank: int, world: int) -> tuple[bool, str, torch.Tensor]:
    """A scheduler that changes momentum in every step, made after attach and on a link that asks for compression."""
    job = Job(rank, auto(quality="balanced"), width=256)
    Brake(job.handle, 2e6)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(job.optimizer, max_lr=0.01, total_steps=40)
    for _ in range(14):
        job.step()
        scheduler.step()
    return job.handle.steering.takeover is not None, str(job.handle.advise()), job.weights()


def test_momentum_that_a_scheduler_cycles_stays_with_the_optimizer(
    pools: Callable[[int], Pool],
) -> None:
    (owned, advice, first), (*_, second) = pools(2).run(cycled)
    assert not owned and torch.equal(first, second)
    assert "Left out: adtopk-1%, topk-1%, topk-5% (the optimizer's momentum, or its" in advice


TAKEN_OVER = "the optimizer's work can be taken over from now on: plans anew"


def learning(
    rank: int, world: int, learned: Sequence[int] = (990, 990), steps: int = 80
) -> tuple[str, list[str]]:
    """Auto after so many steps of every rank's AdamW, which it watches in windows of four; it ends as soon as it has planned anew."""
    job = LinearJob(rank, auto(quality="fastest", window=4), adam=True)
    make_learned(job.optimizer, learned[rank])
    for _ in range(steps):
        job.step()
        # How many trials come before depends on times; all ranks are told the same.
        if TAKEN_OVER in [what for _, what in job.pilot.history][:-1]:
            break
    return str(job.handle.advise()), [what for _, what in job.pilot.history]


def test_adams_work_is_taken_over_when_it_has_learned(pools: Callable[[int], Pool]) -> None:
    for advice, told in pools(2).run(learning):
        early = "998 of 1000 steps have been taken in which Adam learns what to divide by: without adam-int1, adam-int4, adam-topk-1%"
        assert told[0] == early, told
        assert TAKEN_OVER in told
        assert "Left out" not in advice


def waiting(rank: int, world: int) -> tuple[str, list[str]]:
    """Resumed while it waits for Adam to have learned enough."""
    first, job = (LinearJob(rank, auto(quality="fastest", window=4), adam=True) for _ in range(2))
    make_learned(first.optimizer, 900)
    for _ in range(40):
        first.step()
        if first.pilot.phase == "watching":
            break
    job.resume(first)
    make_learned(job.optimizer)
    advice = str(job.handle.advise())
    for _ in range(60):
        job.step()
        if TAKEN_OVER in (what for _, what in job.pilot.history):
            break
    return advice, [what for _, what in job.pilot.history]


def test_what_waited_for_adam_still_does_so_when_resumed(pools: Callable[[int], Pool]) -> None:
    for advice, told in pools(2).run(waiting):
        assert "Left out: adam-int1" in advice
        assert TAKEN_OVER in told


def test_what_another_ranks_optimizer_keeps_is_said(pools: Callable[[int], Pool]) -> None:
    (_, first), (_, second) = pools(2).run(learning, (2000, 100), 12)
    assert first[0].startswith("another worker's optimizer has to keep its work: without adam-int1")
    assert second[0].startswith("108 of 1000 steps have been taken")


def wrapped(rank: int, world: int) -> tuple[torch.Tensor, str]:
    """Auto under DistributedOptimizer, which has buckets of its own."""
    torch.manual_seed(0)
    model = Model(64)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = tw.DistributedOptimizer(inner, model=model, method=auto())
    generator = torch.Generator().manual_seed(rank)
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights, str(optimizer.handle.advise())


def test_auto_works_without_ddp(pools: Callable[[int], Pool]) -> None:
    (first, advice), (second, _) = pools(2).run(wrapped)
    assert torch.equal(first, second)
    assert "dense" in advice


def test_simulated_workers_have_no_link_to_measure() -> None:
    with pytest.raises(UsageError, match="measures a link"):
        tw.simulate(Model(8), workers=2, method=tw.Auto())
