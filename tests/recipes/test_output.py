from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from thinwire.observe.metrics import MetricsLog, Record, Tail, read_metrics
from thinwire.observe.plots import plot_comparison, running_mean
from thinwire.observe.progress import Bars, Lines, make_progress
from thinwire.observe.results import Row
from thinwire.observe.scores import format_spread, group_seeds
from thinwire.observe.tables import cells, results_table

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
    path.write_text('{"a": 1}\n{"a"')
    assert list(tail.new_records()) == [{"a": 1}]
    with path.open("a") as file:
        file.write(": 2}\n")
    assert list(tail.new_records()) == [{"a": 2}]
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
    plot_comparison(tmp_path / "p.png", records, [ROW], "digits")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert running_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]
