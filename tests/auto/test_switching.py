"""Nothing is lost in any of Auto's switches, replicas stay identical, and all ranks switch in the same step.

What is measured and decided is scripted, so that every run goes the same way: dense, measuring under int8, trials, a
winner, a surprise, a new plan. One rank is late now and then.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.auto.linear import LinearJob, Scripted, expected
from tests.pool import Pool

SETTINGS: dict[str, Any] = {"measure_steps": 3, "trial_steps": 1, "window": 2}
MOST_STEPS = 40
TOLERANCE = 2e-5
"""Of the sum of magnitudes: float32 adds up to a hundred gradients."""


class Journey:
    """A job on its way through all phases, and what was seen after every step."""

    def __init__(self, rank: int, trials: Sequence[str], winner: str, *, adam: bool) -> None:
        self.rank, self.adam = rank, adam
        self.job = self.make()
        survey = self.job.pilot.survey
        plans = [(trials, winner), (("int8", "dense"), "dense")]
        self.council = survey.council = Scripted(survey.council, plans)
        self.council.slow_start = True
        self.moved: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []

    def make(self) -> LinearJob:
        auto = tw.Auto(quality="fastest", **SETTINGS)
        return LinearJob(self.rank, auto, adam=self.adam, jitter_s=0.02)

    def step(self) -> None:
        self.job.step()
        self.moved.append(self.job.displacement())
        self.weights.append(self.job.weights())

    def go(self, arrived: Callable[[], bool]) -> None:
        for _ in range(MOST_STEPS):
            self.step()
            if arrived():
                return
        raise AssertionError(self.job.pilot.history)

    def go_all_the_way(self) -> None:
        pilot = self.job.pilot
        self.go(lambda: pilot.phase == "watching")
        self.council.slowdown = 10.0
        self.go(lambda: any("plans anew" in what for _, what in pilot.history))
        self.go(lambda: pilot.phase == "watching")
        self.step()
        self.step()


def travel(rank: int, world: int, trials: Sequence[str], winner: str, adam: bool) -> dict[str, Any]:
    journey = Journey(rank, trials, winner, adam=adam)
    journey.go_all_the_way()
    return {
        "told": journey.job.pilot.history,
        "labels": journey.job.pilot.labels,
        "moved": journey.moved,
        "weights": torch.stack(journey.weights),
        "owned": journey.job.handle.steering.takeover is not None,
    }


def check_conserved(parts: Sequence[torch.Tensor], steps: int, adam: bool) -> None:
    wanted = expected(len(parts), steps, adam=adam)
    error = float((torch.stack(list(parts)).mean(0) - wanted).abs().sum() / wanted.abs().sum())
    assert error < TOLERANCE, (steps, error)


CASES = [
    ("topk-1%", "int4", "topk-residual-5%"),
    ("int4", "adtopk-1%", "topk-1%"),
    ("acpsgd-4", "topk-1%", "int2"),
    ("dgc-0.1%", "int1", "adtopk-residual-1%"),
    ("adam-topk-1%", "int4", "adam-int1"),
    ("int4", "adam-int4", "int8"),
    ("adam-int1", "adam-topk-1%", "int4"),
]
"""What is compared; the first one wins."""
QUICK = (0, 4)


@pytest.mark.parametrize(
    "trials",
    [c if i in QUICK else pytest.param(c, marks=pytest.mark.slow) for i, c in enumerate(CASES)],
    ids=lambda case: case[0] if isinstance(case, tuple) else case,
)
def test_no_switch_of_auto_loses_anything(
    pools: Callable[[int], Pool], trials: tuple[str, ...]
) -> None:
    adam = any(label.startswith("adam") for label in trials)
    results = pools(3).run(travel, trials, trials[0], adam, timeout=300)
    first = results[0]
    for other in results[1:]:
        assert other["told"] == first["told"]
        assert torch.equal(other["weights"], first["weights"])
    for step in range(len(first["moved"])):
        check_conserved([one["moved"][step] for one in results], step + 1, adam)
    told = [what for _, what in first["told"]]
    used = [what.removeprefix("uses ") for what in told if what.startswith("uses ")]
    # What was measured under needs no first trial. All of them take as long here, which asks for a second one.
    tried = [label for label in trials if label != "int8"]
    order = ["int8", *tried, *trials, trials[0], "int8", "dense", "int8", "dense"]
    assert used == [label for label, _ in itertools.groupby(order)], told
    assert set(first["labels"]) == {"dense"}
    # The last one that was tried before dense leaves the optimizer's work to it.
    assert not first["owned"]


def move(rank: int, world: int, trials: Sequence[str], adam: bool) -> tuple[Any, ...]:
    """To another group of the same ranks, with a method in force that holds something back."""
    journey = Journey(rank, trials, trials[0], adam=adam)
    journey.go(lambda: journey.job.pilot.phase == "watching")
    # The winner may have to wait for a dense step.
    journey.step()
    job = journey.job
    before = job.displacement()
    group = dist.new_group(list(range(world)))
    job.ddp = DistributedDataParallel(job.model, process_group=group, bucket_cap_mb=0.01)
    job.handle.regroup(model=job.ddp)
    after = job.displacement()
    taken = job.taken
    for _ in range(3):
        journey.step()
    told = taken, job.pilot.phase, job.pilot.labels
    return before, after, job.displacement(), torch.stack(journey.weights), *told


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) for c in (0, 2, 3)] + [4])
def test_a_move_to_another_group_starts_anew_and_loses_nothing(
    pools: Callable[[int], Pool], case: int
) -> None:
    adam = case == 4
    results = pools(2).run(move, CASES[case], adam, timeout=300)
    *parts, weights, taken, phase, labels = zip(*results, strict=True)
    for steps, displacement in zip((0, 0, 3), parts, strict=True):
        check_conserved(displacement, taken[0] + steps, adam)
    assert torch.equal(weights[0], weights[1])
    assert phase == ("measuring", "measuring") and labels == ((), ())


def resume_everywhere(
    rank: int, world: int, trials: Sequence[str], adam: bool, steps: Sequence[int]
) -> dict[int, Any]:
    """At each of these steps what is saved is loaded into a fresh job, which then goes on."""
    journey = Journey(rank, trials, trials[0], adam=adam)
    found = {}
    for step in range(1, max(steps) + 1):
        journey.step()
        if step not in steps:
            continue
        again = journey.make()
        survey = again.pilot.survey
        survey.council = Scripted(survey.council, [(trials, trials[0])])
        again.resume(journey.job)
        before = again.displacement()
        same = again.pilot.phase == journey.job.pilot.phase
        for _ in range(3):
            again.step()
        after, weights = again.displacement(), again.weights()
        found[step] = (same, before, after, weights, again.pilot.phase)
        again.handle.close()
    return found


@pytest.mark.parametrize(
    "adam, steps",
    [
        (False, (4, 9)),
        pytest.param(False, tuple(range(1, 26)), marks=pytest.mark.slow),
        pytest.param(True, tuple(range(1, 26)), marks=pytest.mark.slow),
    ],
)
def test_resuming_in_the_middle_of_anything_loses_nothing(
    pools: Callable[[int], Pool], adam: bool, steps: tuple[int, ...]
) -> None:
    trials = CASES[4] if adam else CASES[0]
    results = pools(2).run(resume_everywhere, trials, adam, steps, timeout=300)
    for step in steps:
        same, before, after, weights, phase = zip(*(one[step] for one in results), strict=True)
        assert all(same), step
        check_conserved(before, step, adam)
        check_conserved(after, step + 3, adam)
        assert torch.equal(weights[0], weights[1]), step
        assert phase[0] == phase[1]
