"""Trials: which of the plans that were tried wins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from thinwire.auto.trials import Trials


def test_what_was_timed_without_being_a_plan_does_not_win() -> None:
    plans: list[Any] = [
        SimpleNamespace(labels=("int8",), kept=0.9),
        SimpleNamespace(labels=("topk",), kept=0.1),
    ]
    # Resumed in mid-switch: the steps before the first trial were dense, and the fastest.
    seconds = {(): 1.0, ("int8",): 2.0, ("topk",): 1.9}
    assert Trials(plans, seconds).winner(silent_s=0.1) == ("topk",)
