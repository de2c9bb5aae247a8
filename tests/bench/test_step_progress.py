from __future__ import annotations

import io
import itertools

from rich.console import Console

from thinwire.bench.step_cell import plan_cell
from thinwire.bench.step_progress import Estimate, StepProgress, describe_time

CELLS = [plan_cell("small", method, seconds=4.0) for method in ("ddp", "dense", "topk", "adtopk")]


def test_what_is_left_is_corrected_by_what_was_measured() -> None:
    ticks = itertools.chain([0.0, 0.0], [30.0], [50.0])
    estimate = Estimate(lambda: next(ticks))
    assert estimate.seconds(CELLS) == 40.0
    assert estimate.seconds(CELLS[1:]) == 90.0
    assert estimate.seconds(CELLS[2:]) == 50.0


def test_times_are_as_exact_as_estimates() -> None:
    assert [describe_time(s) for s in (0, 43, 400, 9000)] == ["5 s", "45 s", "7 min", "2.5 h"]


def test_pipes_get_lines_and_terminals_a_bar() -> None:
    for terminal in (False, True):
        text = io.StringIO()
        with StepProgress(Console(file=text, width=80, force_terminal=terminal)) as progress:
            progress.count(CELLS)
            progress.say("a row")
            progress.count(CELLS[3:])
            progress.count([])
        shown = text.getvalue()
        assert "a row" in shown and ("3 of 4 measured, about" in shown) is not terminal
        assert ("4/4" in shown) is terminal
