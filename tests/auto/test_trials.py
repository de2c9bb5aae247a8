"""Trials: what is worth one, and which of the plans that were tried wins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.plan.test_decision import decide, describe
from thinwire.auto.trials import Trials, propose
from thinwire.plan.prices import Line
from thinwire.plan.profile import WorkCost

SLOW = WorkCost(Line(0.5, 0.0), Line(0.5, 0.0), 0.0)


def test_what_was_timed_without_being_a_plan_does_not_win() -> None:
    plans: list[Any] = [
        SimpleNamespace(labels=("int8",), kept=0.9),
        SimpleNamespace(labels=("topk",), kept=0.1),
    ]
    # Resumed in mid-switch: the steps before the first trial were dense, and the fastest.
    times = {(): (1.0,), ("int8",): (2.0,), ("topk",): (1.9,)}
    assert Trials(plans, times).winner(silent_s=0.1) == ("topk",)


@pytest.mark.parametrize(
    ("dense_s", "silent_s", "kept"),
    [
        (1.04, 1.0, "dense"),
        # Within 10 % of no communication, and yet 6 % slower than what else was timed.
        (1.08, 1.0, "int8"),
        # The link is slow for both.
        (1.04, 0.5, "int8"),
        (1.019, 0.5, "dense"),
    ],
)
def test_what_is_kept_is_near_the_fastest(dense_s: float, silent_s: float, kept: str) -> None:
    plans: list[Any] = [
        SimpleNamespace(labels=("dense",), kept=1.0),
        SimpleNamespace(labels=("int8",), kept=0.9),
    ]
    times = {("dense",): (dense_s,), ("int8",): (1.02 if silent_s == 1.0 else 1.0,)}
    assert Trials(plans, times).winner(silent_s) == (kept,)


@pytest.mark.parametrize(("gbit", "tried"), [(40, False), (20, True), (10, True)])
def test_dense_is_kept_untried_only_where_nothing_is_predicted_to_be_faster(
    gbit: float, tried: bool
) -> None:
    """At all three rates dense is within 10 % of no communication."""
    decision = decide(describe(world=2), gbit, world=2)
    dense = decision.dense.prediction
    assert dense.step_s < 1.1 * dense.silent_s
    assert (dense.step_s > 1.03 * decision.fastest.prediction.step_s) == tried
    proposal = propose(decision, None, dense.silent_s, 3)
    assert len(proposal.finalists) == (3 if tried else 0)
    assert (proposal.labels == ("dense",) * 6) != tried


def test_what_is_sought_would_be_kept() -> None:
    """Where the link has time for part of a gradient, as much of it is dense as that allows, and no more."""
    decision = decide(describe(world=2), 10, world=2)
    seconds = {
        plan.labels: (plan.prediction.step_s,) for plan in (decision.chosen, decision.fastest)
    }
    trials = Trials([decision.chosen, decision.fastest], seconds)
    assert decision.chosen.kept > decision.fastest.kept
    assert trials.winner(decision.dense.prediction.silent_s) == decision.chosen.labels


def test_plans_that_are_near_each_other_are_tried_twice() -> None:
    plans: list[Any] = [SimpleNamespace(labels=(name,), kept=0.5) for name in "abc"]
    trials = Trials(plans)
    found = {"a": [1.0, 0.95], "b": [1.08, 0.9], "c": [1.3]}
    tried = []
    while (plan := trials.next()) is not None:
        (name,) = plan.labels
        tried.append(name)
        trials.note(plan.labels, found[name].pop(0))
    assert tried == ["a", "b", "c", "a", "b"]
    # A busy moment does not decide.
    assert trials.winner(silent_s=0.1) == ("b",)


def test_a_plan_that_is_far_ahead_is_tried_once() -> None:
    plans: list[Any] = [SimpleNamespace(labels=(name,), kept=0.5) for name in "ab"]
    assert Trials(plans, {("a",): (1.0,), ("b",): (1.2,)}).next() is None
