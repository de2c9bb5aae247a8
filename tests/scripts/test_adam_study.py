"""The studies of Adam and of local steps: every method trains a few steps, and a cell that was put aside goes on with the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = {"steps": 6, "start": 30, "workers": 2, "layers": 1, "width": 64, "context": 16, "batch": 2}
FOREVER = float("inf")
METHOD = "bit1-adam-refresh"


@pytest.fixture
def study(monkeypatch) -> SimpleNamespace:
    """What the modules of a cell have."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from learning import byte_cells, byte_gpt, byte_jobs, byte_model

    modules = (byte_cells, byte_model, byte_jobs, byte_gpt)
    return SimpleNamespace(
        **{name: one for module in modules for name, one in vars(module).items()}
    )


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    for part, count in (("train", 4000), ("valid", 500)):
        (folder / f"{part}.txt").write_bytes(bytes(i * i % 251 for i in range(count)))
    return tmp_path


def test_every_method_trains(study, texts: Path) -> None:
    bits = {}
    for name in study.METHODS:
        training = study.Training(study.Cell(method=name, **SMALL), texts, "cpu", test_windows=2)
        assert training.run(FOREVER)
        row = training.row()
        bits[name] = row["bits"]
        assert len(row["curve"]) == 6 and row["parameters"] > 1000
        assert (row["memory_bytes"] > 0) != (name == "dense" or name.endswith("no-memory"))
    assert bits["dense"] == pytest.approx(32, rel=0.01)
    assert bits["bit1"] < bits["bit2-adam"] < bits["int4"] < bits["int8"] < 10
    assert bits["sparseloco-8"] == 0, "no round ends in six steps"


def test_workers_together_compute_what_each_does_alone(study) -> None:
    cell = study.Cell(method="dense", **{**SMALL, "workers": 3, "layers": 2})
    models = [study.ByteGPT(cell) for _ in range(3)]
    windows = torch.randint(256, (3, 2, 17))
    given, wanted = windows[..., :-1], windows[..., 1:]
    alone = [model(given[i], wanted[i]) for i, model in enumerate(models)]
    weights, _ = torch.func.stack_module_state(models)
    together = study.compute_losses(weights, cell, given, wanted)
    torch.testing.assert_close(together, torch.stack(alone))
    together.sum().backward()
    for worker, model in enumerate(models):
        alone[worker].backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(weights[name].grad[worker], parameter.grad)


def test_inner_steps_together_are_those_of_each_worker(study) -> None:
    cell = study.Cell(method="diloco-8", **SMALL)
    torch.manual_seed(0)
    job = study.LocalWorkers(cell, torch.device("cpu"))
    torch.manual_seed(0)
    plain = [study.ByteGPT(cell) for _ in range(2)]
    plain[1].load_state_dict(plain[0].state_dict())
    optimizers = [study.make_optimizer(model, 1e-3) for model in plain]
    for _ in range(3):
        windows = torch.randint(256, (2, 2, 17))
        job.step(windows, 1e-3)
        for worker, (model, optimizer) in enumerate(zip(plain, optimizers, strict=True)):
            optimizer.zero_grad()
            model(windows[worker, :, :-1], windows[worker, :, 1:]).backward()
            optimizer.step()
    for worker, model in enumerate(plain):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(job.weights[name][worker], parameter, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["topk1-adam", "bit1-adam-refresh", "sparseloco-8"])
def test_a_cell_put_aside_goes_on(study, texts: Path, tmp_path: Path, name: str) -> None:
    # The tenth step is behind a round of local steps.
    cell = study.Cell(method=name, **{**SMALL, "steps": 10})
    whole = study.Training(cell, texts, "cpu", test_windows=2)
    whole.run(FOREVER)
    first = study.Training(cell, texts, "cpu", test_windows=2)
    assert not first.run(FOREVER, stop=9)
    path = tmp_path / "cell.pt"
    first.save(path)
    second = study.Training(cell, texts, "cpu", test_windows=2)
    second.load(path)
    assert second.run(FOREVER)
    assert second.curve == whole.curve
    assert second.row()["bits"] == pytest.approx(whole.row()["bits"])


@pytest.mark.slow
def test_a_sitting_writes_rows_and_does_not_train_them_again(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(BENCHMARKS / "h200_adam.py"), "--device", "cpu", "--tiny"]
    command += ["--data-dir", str(texts), "--out", str(out), "--steps", "2"]
    command += ["--methods", f"dense,{METHOD}@50"]
    for expected in ("2 of 2", "0 of 2"):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        assert f"{expected} cells have no row yet" in done.stdout
    rows = json.loads((out / "rows.json").read_text())
    assert {(row["method"], row["start"]) for row in rows} == {("dense", 5), (METHOD, 50)}
    assert METHOD in (out / "summary.txt").read_text()
