"""States whose decision is void, or was not made yet: all that they hold arrives all the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.auto.linear import LinearJob, Scripted, draw, expected, flatten
from tests.lanes import slow
from tests.pool import Pool

SETTINGS: dict[str, Any] = {"measure_steps": 3, "trial_steps": 1, "window": 1000}
MOST_STEPS = 30
AFTER = 4
TOLERANCE = 2e-5

Saved = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""Model, optimizer, handle."""


def make(rank: int, adam: bool, quality: str = "fastest") -> LinearJob:
    return LinearJob(rank, tw.Auto(quality=quality, **SETTINGS), adam=adam)


def settle(job: LinearJob, winner: str) -> None:
    """Until this one is in force, with something held back."""
    survey = job.pilot.survey
    survey.council = Scripted(survey.council, [((winner,), winner)])
    for _ in range(MOST_STEPS):
        job.step()
        if job.pilot.phase == "watching" and set(job.pilot.labels) == {winner}:
            job.step()
            return
    raise AssertionError(job.pilot.history)


def save(job: LinearJob) -> Saved:
    parts = job.model.state_dict(), job.optimizer.state_dict(), job.handle.state_dict()
    return deepcopy(parts)


def go_on(job: LinearJob) -> list[Tensor]:
    """What gradients so far will have moved, now and after each of some steps."""
    moved = [job.displacement()]
    for _ in range(AFTER):
        job.step()
        moved.append(job.displacement())
    return moved


def check(moved: list[list[Tensor]], wanted: Callable[[int], Tensor]) -> None:
    for step, parts in enumerate(zip(*moved, strict=True)):
        error = (torch.stack(parts).mean(0) - wanted(step)).abs().sum() / wanted(step).abs().sum()
        assert float(error) < TOLERANCE, step


def in_another_class(rank: int, world: int, winner: str, adam: bool) -> dict[str, Any]:
    """Saved under a candidate of the boldest class, loaded where only the safe ones may be chosen."""
    job, again = make(rank, adam), make(rank, adam, "safe")
    settle(job, winner)
    again.resume(job)
    phase, labels = again.pilot.phase, again.pilot.labels
    moved = go_on(again)
    owned = again.handle.steering.takeover is not None
    return {
        "taken": job.taken,
        "moved": moved,
        "weights": again.weights(),
        "found": (phase, labels, owned),
    }


@pytest.mark.parametrize(
    ("winner", "adam"),
    [("dgc-0.1%", False), ("adam-topk-1%", True), slow("topk-residual-5%", False)],
)
def test_in_another_class_only_the_decision_is_void(
    pools: Callable[[int], Pool], winner: str, adam: bool
) -> None:
    first, second = pools(2).run(in_another_class, winner, adam)
    check(
        [first["moved"], second["moved"]],
        lambda step: expected(2, first["taken"] + step, adam=adam),
    )
    assert torch.equal(first["weights"], second["weights"])
    # All is measured anew, dense, and the optimizer has its work back.
    assert first["found"] == second["found"] == ("measuring", (), False)


def under_bf16(rank: int, world: int) -> tuple[str, list[str]]:
    """Saved and loaded under a candidate that holds nothing back."""
    job, again = make(rank, adam=True), make(rank, adam=True)
    settle(job, "bf16")
    said = Said()
    logging.getLogger("thinwire").addHandler(said)
    again.resume(job)
    logging.getLogger("thinwire").removeHandler(said)
    (label,) = set(again.pilot.labels)
    return label, said.lines


def test_nothing_is_missed_where_nothing_is_held_back(pools: Callable[[int], Pool]) -> None:
    assert pools(2).run(under_bf16) == [("bf16", []), ("bf16", [])]


def save_settled(rank: int, world: int, winner: str, adam: bool) -> tuple[Saved, int]:
    job = make(rank, adam)
    settle(job, winner)
    return save(job), job.taken


def load_all(rank: int, world: int, states: list[Saved], adam: bool, taken: int) -> list[Tensor]:
    job = make(rank, adam)
    model, optimizer, _ = deepcopy(states[0])
    job.model.load_state_dict(model)
    job.optimizer.load_state_dict(optimizer)
    job.handle.load_state_dict([deepcopy(state[2]) for state in states], on_world_change="mean")
    job.taken = taken
    if adam:
        # Whatever was applied is in the weights; only what follows is compared.
        before = job.displacement()
        return [moved - before for moved in go_on(job)]
    return go_on(job)


@pytest.mark.parametrize(("winner", "adam"), [("topk-1%", False), slow("adam-int1", True)])
def test_among_another_number_of_workers_nothing_is_lost(
    pools: Callable[[int], Pool], winner: str, adam: bool
) -> None:
    saved = pools(3).run(save_settled, winner, adam)
    states, taken = [state for state, _ in saved], saved[0][1]

    def wanted(step: int) -> Tensor:
        later = expected(2, taken + step, adam=adam) - expected(2, taken, adam=adam)
        return later if adam else expected(3, taken) + later

    moved = pools(2).run(load_all, states, adam, taken)
    if adam:
        moved = [one[1:] for one in moved]
        check(moved, lambda step: wanted(step + 1))
    else:
        check(moved, wanted)


def back_in_time(rank: int, world: int, adam: bool, handle_first: bool) -> dict[str, Any]:
    """The same job loads what it saved before any decision, while another method is in force."""
    job = make(rank, adam)
    job.step()
    model, optimizer, handle = save(job)
    early = deepcopy((job.taken, job._applied))
    settle(job, "adam-topk-1%" if adam else "topk-1%")
    loads = [
        lambda: job.optimizer.load_state_dict(optimizer),
        lambda: job.handle.load_state_dict(handle),
    ]
    job.model.load_state_dict(model)
    for load in reversed(loads) if handle_first else loads:
        load()
    job.taken, job._applied = early
    in_force = {row.dense for row in job.handle.plan()}
    owned = job.handle.steering.takeover is not None
    return {"found": (job.pilot.phase, in_force, owned), "moved": go_on(job)}


@pytest.mark.parametrize(
    ("adam", "handle_first"), [(False, False), slow(False, True), (True, False), slow(True, True)]
)
def test_a_state_without_a_decision_ends_what_is_in_force(
    pools: Callable[[int], Pool], adam: bool, handle_first: bool
) -> None:
    first, second = pools(2).run(back_in_time, adam, handle_first)
    assert first["found"] == ("measuring", {True}, False)
    check([first["moved"], second["moved"]], lambda step: expected(2, 1 + step, adam=adam))


def dense_in_the_handles_hands(rank: int, world: int) -> tuple[list[Tensor], int]:
    """Dense was chosen after a method that owns momentum, which stays where it is."""
    job, again = make(rank, adam=False), make(rank, adam=False)
    survey = job.pilot.survey
    survey.council = Scripted(survey.council, [(("topk-1%", "dense"), "dense")])
    while job.pilot.phase != "watching":
        job.step()
    job.step()
    job.step()
    assert job.handle.steering.takeover is not None
    again.resume(job)
    return go_on(again), job.taken


def test_momentum_of_a_dense_plan_is_resumed(pools: Callable[[int], Pool]) -> None:
    (first, taken), (second, _) = pools(2).run(dense_in_the_handles_hands)
    check([first, second], lambda step: expected(2, taken + step))


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def without_an_optimizer(rank: int, world: int) -> list[str]:
    job = make(rank, adam=False)
    settle(job, "topk-1%")
    said = Said()
    logging.getLogger("thinwire").addHandler(said)
    ddp = DistributedDataParallel(deepcopy(job.model), bucket_cap_mb=0.01)
    handle = tw.attach(ddp, tw.Auto())
    handle.load_state_dict(deepcopy(job.handle.state_dict()))
    ddp(draw(rank, job.taken)).backward()
    logging.getLogger("thinwire").removeHandler(said)
    assert flatten([p.grad for p in ddp.parameters()]).isfinite().all()
    return said.lines


def test_what_cannot_be_given_back_is_said(pools: Callable[[int], Pool]) -> None:
    for lines in pools(2).run(without_an_optimizer):
        assert any("no optimizer here that it could be given back to" in line for line in lines)
