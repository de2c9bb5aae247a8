from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from thinwire.tools.comparison import cells, results_table
from thinwire.tools.metrics import MetricsLog, Record, Tail, read_metrics
from thinwire.tools.pace import seconds_of_run, seconds_to
from thinwire.tools.plots import plot_comparison, running_mean
from thinwire.tools.progress import Bars, Lines, make_progress
from thinwire.tools.results import Row, group_seeds
from thinwire.tools.scores import format_spread

ROW = Row(
    run="adtopk",
    method="adtopk",
    settings="ADTopK()",
    asked_density=0.001,
    seed=0,
    density=0.00094,
    metric="top1",
    higher_is_better=True,
    score=0.981,
    metrics={"top1": 0.981, "top5": 1.0},
    tests=[[1, 0.5], [2, 0.981]],
    steps=2,
    parameters=151306,
    dense_bytes_per_step=907836.0,
    wire_bytes_per_step=20376.0,
    ratio=44.55,
    ms_per_step=12.34,
    exposed_ms_per_step=1.5,
    examples_per_second=10373.0,
    replicas_identical=True,
    seconds=3.0,
)

RECORDS: list[Record] = [
    {
        "run": "adtopk",
        "event": "start",
        "steps": 2,
        "step": 0,
        "steps_per_epoch": 1,
        "examples_per_step": 128,
        "metric": "top1",
    },
    {"run": "adtopk", "event": "step", "step": 1, "loss": 2.3, "wire_bytes": 10, "ms": 5.0},
    {
        "run": "adtopk",
        "event": "step",
        "step": 2,
        "loss": math.nan,
        "wire_bytes": 20_000,
        "ms": 5.0,
        "exposed_ms": 0.25,
    },
    {"run": "adtopk", "event": "test", "step": 2, "score": 0.5, "metrics": {"top1": 0.5}},
]


def test_metrics_are_read_as_they_were_written(tmp_path: Path) -> None:
    heard: list[Record] = []
    log = MetricsLog(tmp_path / "m.jsonl", [heard.append])
    log.add(RECORDS[:1])
    log.add(RECORDS[1:])
    log.close()
    assert heard == RECORDS
    without_nan = [{k: None if v != v else v for k, v in r.items()} for r in RECORDS]
    assert read_metrics(tmp_path / "m.jsonl") == without_nan


def test_a_tail_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = Tail(path)
    assert list(tail.new_records()) == []
    first, second = ({"run": "a", "event": "test", "step": step} for step in (1, 2))
    lines = "".join(f"{json.dumps(record)}\n" for record in (first, second))
    path.write_text(lines[:-9])
    assert list(tail.new_records()) == [first]
    path.write_text(lines)
    assert list(tail.new_records()) == [second]
    assert list(tail.new_records()) == []


def test_the_table_fits_a_terminal_and_shows_small_densities() -> None:
    assert cells([ROW]) == (
        "adtopk", "0.1%", "0.094%", "98.1%", "0.9078", "0.0204", "44.5x", "12.3", "yes",
    )  # fmt: skip
    assert cells([replace(ROW, replicas_identical=False, asked_density=None)])[1::7] == ("-", "NO")
    console = Console(width=80, file=io.StringIO())
    console.print(results_table([ROW], "digits"))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "…" not in shown
    assert "identical" in shown


def test_seconds_to_a_target_fit_too_and_a_loss_of_accuracy_is_red() -> None:
    dense = replace(ROW, run="dense", method="dense", asked_density=None, score=0.995)
    steps = {"adtopk": [r for r in RECORDS if r["event"] == "step"]}
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(results_table([dense, ROW], "digits", 0.95, steps))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "…" not in shown
    lines = [line for line in shown.splitlines() if "dense" in line or "adtopk" in line]
    assert "to 95%" in shown and "0.0" in lines[1] and lines[0].split()[-2] == "-"
    # 1.4 points are lost, and only the line that lost them is marked.
    assert "\x1b[1;31m" in lines[1] and "\x1b[1;31m" not in lines[0]


def test_the_time_to_a_target_counts_steps_up_to_the_first_test_as_good() -> None:
    steps = [{"run": "adtopk", "event": "step", "step": n, "ms": 100.0 * n} for n in (1, 2, 3)]
    row = replace(ROW, tests=[[1, None], [2, 0.95], [3, 0.9]])
    assert seconds_of_run(0.95, row, steps) == pytest.approx(0.3)
    assert seconds_of_run(0.96, row, steps) is None
    lower = replace(row, higher_is_better=False, tests=[[1, 30.0], [3, math.nan], [3, 20.0]])
    assert seconds_of_run(25.0, lower, steps) == pytest.approx(0.6)
    # Half of its steps were never timed, and a seed that does not get there has no time.
    assert seconds_of_run(0.95, row, steps[1:]) is None
    other = replace(row, run="other", tests=[[3, 0.5]])
    assert seconds_to(0.95, [row, other], {"adtopk": steps, "other": steps}) is None


def test_seeds_are_shown_as_mean_and_spread() -> None:
    seeds = [
        replace(ROW, run=f"adtopk#{n}", seed=n, score=score) for n, score in ((0, 0.9), (1, 1))
    ]
    other = replace(ROW, run="adtopk@0.01", asked_density=0.01)
    assert [len(group) for group in group_seeds([*seeds, other])] == [2, 1]
    assert cells(seeds)[3] == "95.0% ± 7.1"
    assert format_spread("perplexity", [20.0, 22.0]) == "21 ± 1.4"
    assert format_spread("perplexity", [20.0, math.inf]) == "inf"
    console = Console(width=90, file=io.StringIO())
    console.print(results_table([*seeds, other], "digits"))
    assert isinstance(console.file, io.StringIO)
    assert "seeds" in console.file.getvalue()


def test_a_resumed_run_replaces_what_it_does_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    start, first, second, test = RECORDS
    first_log = MetricsLog(path)
    first_log.add([start, first, {**second, "loss": 9.0}, test])
    first_log.close()
    with path.open("a") as file:
        file.write('{"run": "adtopk", "ev')
    log = MetricsLog(path, append=True)
    log.add([{**start, "step": 1}, {**second, "loss": 2.0}, {**test, "score": 0.25}])
    log.close()
    assert [(r["event"], r.get("loss"), r.get("score")) for r in read_metrics(path)] == [
        ("start", None, None), ("step", 2.3, None), ("step", 2.0, None), ("test", None, 0.25),
    ]  # fmt: skip


def test_lines_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO())
    with make_progress(console) as progress:
        assert isinstance(progress, Lines)
        for record in RECORDS:
            progress.show(record)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "adtopk: 2 steps",
        "adtopk: step 2/2 loss nan     test 50.0%  25,600 examples/s, 0.0200 MB sent, 0.2 ms exposed",
    ]


def test_bars_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with make_progress(console) as progress:
        assert isinstance(progress, Bars)
        for record in RECORDS:
            progress.show(record)
    assert isinstance(console.file, io.StringIO)
    assert "2/2" in console.file.getvalue()


def test_the_picture_is_drawn_even_if_a_run_diverged(tmp_path: Path) -> None:
    records = [{k: None if v != v else v for k, v in r.items()} for r in RECORDS]
    for timed in (False, True):
        plot_comparison(tmp_path / "p.png", records, [ROW], "digits", timed=timed)
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert running_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]
