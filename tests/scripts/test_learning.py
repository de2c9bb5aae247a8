"""The script of the learning evidence: a small run from beginning to end, its plan and its verdicts."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = str(ROOT / "benchmarks")
NOT_NEEDED = ("typer", "rich", "matplotlib", "sklearn")


@pytest.fixture(scope="module", autouse=True)
def _beside_the_script():
    sys.path.insert(0, BENCHMARKS)
    yield
    sys.path.remove(BENCHMARKS)


def run_script(out: Path, without: Path) -> str:
    """Where only torch and numpy are installed."""
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in NOT_NEEDED)
    (without / "sitecustomize.py").write_text(f"import sys\n{blocked}")
    command = [sys.executable, "benchmarks/h200_learning.py", "--device", "cpu", "--quick"]
    command += ["--seats", "2", "--out", str(out)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(without), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_quick_run_leaves_rows_curves_a_summary_and_a_picture(tmp_path):
    from learning.report import markdown_table, plot
    from learning.store import read_rows

    out = tmp_path / "out"
    (tmp_path / "without").mkdir()
    printed = run_script(out, tmp_path / "without")
    rows = read_rows(out / "rows.json")
    assert len(rows) == 7 and {row["epochs"] for row in rows} == {2}
    assert all(row["about"]["workers"] == 2 and row["origin"]["versions"] for row in rows)
    curves = json.loads((out / "curves.json").read_text())
    assert [len(curve["epochs"]) for curve in curves.values()] == [2] * 7
    assert all(curve["finished"] for curve in curves.values())
    with (out / "rows.csv").open() as file:
        assert [line["score"] for line in csv.DictReader(file)] == [str(r["score"]) for r in rows]
    assert (out / "summary.txt").read_text() in printed
    assert "adtopk" in markdown_table(rows, "cifar10-resnet20")
    plot(rows, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").stat().st_size > 10_000
    assert printed.count("ms per step,") > 7
    again = run_script(out, tmp_path / "without")
    assert again.count("every cell is there already") == 2 and "ms per step" not in again


def test_a_process_that_fails_is_replaced():
    from learning.cells import quick_studies
    from learning.seats import Order, Seats

    cell = quick_studies()[0].cells(1)[0]
    settings = cell.settings({"synthetic": True, "tiny": True}, "cpu", False, 1)
    bad = {**settings, "method": {"name": "nobody"}}
    late = time.monotonic() + 120
    orders = [
        Order(key=key, settings=chosen, deadline=late)
        for key, chosen in (("bad", bad), ("good", settings), ("left out", settings))
    ]
    said: list[str] = []
    seats = Seats(1, said.append)
    try:
        events = list(seats.run(orders, lambda order: order.key != "left out"))
    finally:
        seats.close()
    assert [(key, kind) for key, kind, _ in events if kind != "epoch"] == [
        ("bad", "failed"),
        ("good", "done"),
        ("left out", "skipped"),
    ]
    assert "method is 'nobody'" in said[0]


def test_every_planned_cell_can_be_built():
    from learning.cells import studies

    from thinwire.recipes.job import build_job

    keys = []
    for study in studies():
        for cell in study.cells(study.most):
            job = build_job("train", cell.settings({}, "cuda", True, None), out=Path())
            assert job.running.world == 8 and job.training.epochs == study.most
            keys.append(cell.key)
    assert len(keys) == len(set(keys)) == 18 + 12 + 5 + 5
    assert keys[0] == "cifar10-resnet20/dense#0" and keys[-1] == "wikitext2-small-gpt/acpsgd#0"


def test_epochs_are_as_many_as_fit():
    from learning.cells import studies
    from learning.planning import Pace, choose_epochs, finish_time

    assert finish_time([4.0, 3.0, 2.0, 2.0], 2) == 6.0
    study = studies()[0]
    pace = Pace()
    for method, ms in (("dense", 10.0), ("oktopk", 40.0)):
        entry = {"ms_per_step": ms, "steps_per_epoch": 100}
        pace.learn(method, {"entry": entry, "setup_s": 1.0, "test_s": 0.5})
    assert pace.seconds("dgc", 1) == pace.seconds("oktopk", 1)
    cells = study.only(["dense", "oktopk"]).cells(study.most)
    assert choose_epochs(cells, pace, 15, 1000.0, study) == study.most
    assert choose_epochs(cells, pace, 15, 100.0, study) == 19
    assert choose_epochs(cells, pace, 15, 1.0, study) == study.fewest
    pace.correct("oktopk", 10, 2 * pace.rates["oktopk"].seconds(10))
    assert pace.seconds("oktopk", 10) == 2 * pace.rates["oktopk"].seconds(10)


def make_rows(method: str, density: float | None, scores: list[float | None], **more):
    return [
        {
            "task": "cifar10-resnet20",
            "method": method,
            "asked_density": density,
            "density": density or 1.0,
            "ratio": 30.0,
            "metric": "top1",
            "higher_is_better": True,
            "score": score,
            "epochs": 30,
            "data": "re-encoded",
            **more,
        }
        for score in scores
    ]


def test_verdicts_against_dense():
    from learning.report import lines_with_dense, summary_text

    rows = make_rows("dense", None, [0.900, 0.902])
    rows += make_rows("adtopk", 0.01, [0.899, 0.901])
    rows += make_rows("topk", 0.01, [0.8985, 0.8984])
    rows += make_rows("dgc", 0.01, [0.890, 0.891])
    rows += make_rows("oktopk", 0.01, [None, 0.891])
    rows += make_rows("dgc", 0.001, [0.8965])
    found = {
        (line.first["method"], line.first["asked_density"]): line.verdict
        for line in lines_with_dense(rows)
    }
    assert found == {
        ("dense", None): "",
        ("adtopk", 0.01): "level",
        ("topk", 0.01): "close",
        ("dgc", 0.01): "behind (limit 0.3)",
        ("oktopk", 0.01): "behind (limit 0.3)",
        ("dgc", 0.001): "level",
    }
    text = summary_text(rows)
    assert "-0.10 points (spread 0.20)" in text and "30 epochs re-encoded" in text
    words = make_rows("dense", None, [100.0], metric="perplexity", higher_is_better=False)
    words += make_rows("adtopk", 0.01, [101.5], metric="perplexity", higher_is_better=False)
    assert lines_with_dense(words)[1].verdict == "behind (limit 1)"
    assert "-1.50 %" in summary_text(words)
    assert lines_with_dense(words[1:]) == []
