"""tw.Auto on real gloo ranks: decisions are the same everywhere, nothing is lost, and nothing is compressed for nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.auto.workers import Brake, Job, Model, auto
from tests.lanes import slow
from tests.pool import Pool
from thinwire.auto import profile_steps
from thinwire.auto.survey import WARM_STEPS
from thinwire.plan import Profile, find_candidates

STEPS = 32


def slow_link(rank: int, world: int) -> dict[str, Any]:
    """8 MB/s: dense takes a tenth of a second, and top-k with momentum correction is the fastest that is balanced with SGD."""
    job = Job(rank, auto(quality="balanced"), width=256)
    Brake(job.handle, 8e6)
    job.run(STEPS)
    pilot = job.handle.steering.pilot
    assert pilot is not None
    return {
        "phase": pilot.phase,
        "labels": pilot.labels,
        "history": [step for step, _ in pilot.history],
        "told": [what for _, what in pilot.history],
        "weights": job.weights(),
        "advice": str(job.handle.advise()),
        "why": {row.reason for row in job.handle.plan().rows},
        "momentum": job.optimizer.param_groups[0]["momentum"],
    }


def test_on_a_slow_link_all_ranks_switch_in_the_same_step(pools: Callable[[int], Pool]) -> None:
    results = pools(3).run(slow_link, timeout=180)
    first = results[0]
    assert first["phase"] == "watching", first["told"]
    assert set(first["labels"]) != {"dense"}, first["told"]
    for other in results[1:]:
        assert other["labels"] == first["labels"]
        assert other["history"] == first["history"]
        assert torch.equal(other["weights"], first["weights"])
    assert "chosen" in first["advice"] and "(predicted; tried: " in first["advice"]
    assert "chosen by tw.Auto()" in first["why"]
    assert not any(why.startswith(("by rule", "default")) for why in first["why"]), first["why"]
    assert first["momentum"] == 0.0


def entangled(rank: int, world: int) -> dict[str, Any]:
    """The backward pass stands still while something travels, so that dense steps look as if they took as long without."""
    job = Job(rank, auto(quality="balanced"), width=256, bucket_mb=0.2, entry=16)
    brake = Brake(job.handle, 2e7)
    for layer in job.model.layers:
        layer.register_full_backward_hook(lambda *_: brake.wait())
    job.run(60)
    pilot = job.handle.steering.pilot
    assert pilot is not None and pilot.profile is not None and pilot.decision is not None
    told = [what for _, what in pilot.history]
    ratio = pilot.decision.dense.prediction.step_s / pilot.profile.conditions.silent_s
    return {"labels": pilot.labels, "told": told, "phase": pilot.phase, "dense": ratio}


def test_where_computing_slows_down_beside_the_exchange_dense_is_not_taken_for_free(
    pools: Callable[[int], Pool],
) -> None:
    results = pools(2).run(entangled, timeout=180)
    for one in results:
        assert one["phase"] == "watching", one["told"]
        assert "dense" not in one["labels"], one["told"]
        # The step without communication was seen in steps that sent nothing meanwhile.
        assert one["dense"] > 2, one["dense"]
        assert one["labels"] == results[0]["labels"]


PAUSE_S = 0.4


def pausing(rank: int, world: int) -> tuple[str, list[str], float]:
    """One rank stands still once, in the middle of a quiet backward."""
    job = Job(rank, auto(), width=256)
    Brake(job.handle, 2e7)
    pilot = job.handle.steering.pilot
    assert pilot is not None
    backwards = itertools.count()

    def pause(*_: Any) -> None:
        if next(backwards) == WARM_STEPS and rank == 1:
            time.sleep(PAUSE_S)

    job.model.layers[1].register_full_backward_hook(pause)
    for _ in range(STEPS):
        job.step()
        if pilot.phase != "measuring":
            break
    assert pilot.profile is not None
    # Where dense is kept, that is without a trial.
    return pilot.phase, [what for _, what in pilot.history], pilot.profile.conditions.silent_s


def test_one_pause_does_not_make_a_step_look_long_without_communication(
    pools: Callable[[int], Pool],
) -> None:
    for phase, told, silent_s in pools(2).run(pausing, timeout=120):
        assert silent_s < PAUSE_S / 2
        assert phase == "trying", told


def failing(rank: int, world: int, at: int) -> tuple[list[bool], str, Any]:
    """A backward that fails once, on all ranks, with nothing delivered yet."""
    model = Model(64)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = tw.DistributedOptimizer(inner, model=model, method=auto(), bucket_mb=0.01)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            if taken == at:
                raise RuntimeError("no memory left")
            return gradient

    model.layers[2].register_forward_hook(lambda *args: Fails.apply(args[-1]))
    failed = []
    for taken in range(16):
        optimizer.zero_grad()
        try:
            model(torch.ones(8, 64)).square().mean().backward()
            optimizer.step()
        except RuntimeError:
            failed.append(taken)
    pilot = optimizer.handle.steering.pilot
    assert pilot is not None
    return failed, pilot.phase, [p.detach().sum().item() for p in model.parameters()]


@pytest.mark.parametrize("at", [0, slow(1), 2, slow(3)])
def test_a_backward_that_fails_does_not_end_measuring(
    pools: Callable[[int], Pool], at: int
) -> None:
    first, second = pools(2).run(failing, at)
    assert first == second
    failed, phase, _ = first
    assert failed == [at] and phase != "measuring"


def unhindered(rank: int, world: int, width: int) -> tuple[Any, str]:
    job = Job(rank, None, width=width)
    job.handle.switch(auto())
    job.run(14)
    pilot = job.handle.steering.pilot
    assert pilot is not None
    return pilot.labels, str(job.handle.advise())


def test_a_tiny_model_is_not_compressed(pools: Callable[[int], Pool]) -> None:
    for labels, advice in pools(3).run(unhindered, 16, timeout=120):
        assert set(labels) <= {"dense"}
        assert "do not compress" in advice


def alone(rank: int, world: int) -> str:
    job = Job(rank, None)
    job.run(3)
    return str(job.handle.advise())


def test_one_worker_has_nothing_to_compress(pools: Callable[[int], Pool]) -> None:
    assert "one worker" in pools(1).run(alone)[0]


def profiled(rank: int, world: int, merge_bytes: int) -> Profile:
    job = Job(rank, tw.Dense(), width=128, bucket_mb=0.06)
    job.handle.reducer.merge_bytes = merge_bytes
    dense = find_candidates("safe", "unknown", 2)
    return profile_steps(job.handle.reducer, job.step, dense, steps=2)


def test_a_profile_has_buckets_and_how_they_are_merged(pools: Callable[[int], Pool]) -> None:
    """Four layers of 64 KB in buckets of their own, which wait for each other up to 100 KB; nobody waits for the last."""
    single, merged = (pools(1).run(profiled, nbytes)[0] for nbytes in (0, 200_000))
    assert [unit.names for unit in single.units] == [unit.names for unit in merged.units]
    assert [len(unit.names) for unit in single.units] == [2, 2, 2, 2]
    assert [unit.with_next for unit in single.units] == [False] * 4
    assert [unit.with_next for unit in merged.units] == [True, False, False, False]
    assert merged.units[0].ready_s == merged.units[1].ready_s
    assert merged.coalesce_bytes == single.coalesce_bytes == 512 << 10
    assert [unit.ready_s for unit in merged.units] == sorted(unit.ready_s for unit in merged.units)


def changing_link(rank: int, world: int) -> dict[str, Any]:
    """A link that slows down in mid-run, and every step's worth of gradient accounted for.

    The model is small, so that a busy machine's own delays do not look like a link that is worth while to spare.
    """
    job = Job(rank, auto(window=4), width=128)
    brake = Brake(job.handle, 1e12)
    pilot = job.handle.steering.pilot
    assert pilot is not None
    for _ in range(40):
        job.step()
        if pilot.phase == "watching":
            break
    before = pilot.labels
    brake.bytes_per_s = 3e6
    for _ in range(60):
        job.step()
        if pilot.phase == "watching" and set(pilot.labels) != {"dense"}:
            break
    job.run(2)
    return {
        "before": before,
        "after": pilot.labels,
        "told": pilot.history,
        "weights": job.weights(),
    }


def test_a_link_that_slows_down_is_planned_for_anew(pools: Callable[[int], Pool]) -> None:
    results = pools(2).run(changing_link, timeout=240)
    first = results[0]
    assert set(first["before"]) == {"dense"}, first["told"]
    assert set(first["after"]) != {"dense"}, first["told"]
    assert any("plans anew" in what for _, what in first["told"])
    for other in results[1:]:
        assert [step for step, _ in other["told"]] == [step for step, _ in first["told"]]
        assert torch.equal(other["weights"], first["weights"])


def interrupted(rank: int, world: int, steps: int) -> tuple[Any, ...]:
    """State saved after so many steps, and what a fresh handle makes of it."""
    job = Job(rank, auto())
    Brake(job.handle, 30e6)
    job.run(steps)
    pilot = job.handle.steering.pilot
    assert pilot is not None
    state, optimizer = job.handle.state_dict(), job.optimizer.state_dict()
    again = Job(rank, auto())
    Brake(again.handle, 30e6)
    again.model.load_state_dict(job.model.state_dict())
    again.optimizer.load_state_dict(optimizer)
    again.handle.load_state_dict(state)
    resumed = again.handle.steering.pilot
    assert resumed is not None
    assert resumed.state() == pilot.state()
    assert (resumed.phase == "measuring") == (again.handle.reducer.on_ready is not None)
    found = (pilot.phase, pilot.labels, resumed.phase, resumed.labels)
    same = torch.equal(
        job.handle.residual("layers.0.weight"), again.handle.residual("layers.0.weight")
    )
    again.run(3)
    measured = [what for _, what in resumed.history if "predicted" in what]
    return (*found, same, measured, again.weights())


def test_a_decision_is_replayed_without_measuring_again(pools: Callable[[int], Pool]) -> None:
    results = pools(2).run(interrupted, 30, timeout=240)
    for phase, labels, resumed_phase, resumed, same, measured, weights in results:
        assert phase == resumed_phase == "watching"
        assert resumed == labels
        assert same and not measured
        assert torch.equal(weights, results[0][-1])


def test_resuming_in_the_middle_of_measuring_measures_anew(pools: Callable[[int], Pool]) -> None:
    for phase, labels, resumed_phase, resumed, same, *_ in pools(2).run(interrupted, 4):
        assert phase == resumed_phase == "measuring"
        assert same and resumed == labels
