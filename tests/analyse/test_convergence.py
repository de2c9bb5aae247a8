from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.analyse.convergence import measure_xi
from thinwire.cli import main
from thinwire.errors import UsageError

DENSITY = 0.1


def backward(sim: tw.Simulation, same: bool = False) -> None:
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(8, 20, generator=generator) for _ in sim.ranks]
    for rank in sim.ranks:
        with sim.worker(rank):
            sim.model(batches[0 if same else rank]).square().sum().backward()


def keep_of_each_output(values: Tensor) -> Tensor:
    kept = torch.zeros_like(values)
    for row in range(values.shape[0]):
        largest = values[row].abs().topk(2).indices
        kept[row, largest] = values[row, largest]
    return kept


def keep_of_all(values: Tensor) -> Tensor:
    kept = torch.zeros(values.numel())
    largest = values.flatten().abs().topk(int(DENSITY * values.numel())).indices
    kept[largest] = values.flatten()[largest]
    return kept.view(values.shape)


@pytest.mark.parametrize(
    ("method", "keep"), [(tw.ADTopK, keep_of_each_output), (tw.TopK, keep_of_all)]
)
def test_xi_is_its_definition(method, keep):
    torch.manual_seed(0)
    model = nn.Linear(20, 12)
    sim = tw.simulate(model, method(density=DENSITY, dense_fallback=False), workers=3)
    for _ in range(2):
        backward(sim)
        sim.exchange()
        with torch.no_grad():
            model.weight -= 0.01 * model.weight.grad
    backward(sim)
    gradients = [sim.gradient("weight", rank) for rank in sim.ranks]
    compensated = [g + sim.residual("weight", r) for r, g in enumerate(gradients)]
    mean_c, mean_g = sum(compensated) / 3, sum(gradients) / 3
    apart = sum(keep(c) for c in compensated) / 3
    expected = ((keep(mean_c) - apart).norm() / mean_g.norm()).item()
    assert expected > 0.05
    assert measure_xi(sim) == {"weight": pytest.approx(expected, rel=1e-5)}


def test_workers_that_see_the_same_disagree_in_nothing():
    sim = tw.simulate(nn.Linear(20, 12), tw.TopK(density=0.1, dense_fallback=False), workers=2)
    backward(sim, same=True)
    assert measure_xi(sim) == {"weight": 0.0}


@pytest.mark.parametrize(
    "method", [tw.GaussianK, tw.SIDCo, tw.ChunkTopK, tw.OkTopK, tw.RandomK], ids=str
)
def test_any_method_that_chooses_has_a_xi(method):
    sim = tw.simulate(nn.Linear(20, 12), method(density=0.1, dense_fallback=False), workers=2)
    backward(sim, same=True)
    # The same on both: nobody disagrees.
    assert measure_xi(sim) == {"weight": pytest.approx(0.0, abs=1e-6)}
    backward(sim)
    assert measure_xi(sim)["weight"] >= 0


def test_methods_that_do_not_choose_are_refused():
    sim = tw.simulate(nn.Linear(20, 12), tw.PowerSGD(rank=1, dense_fallback=False), workers=2)
    backward(sim)
    with pytest.raises(UsageError, match="method is PowerSGD, for which there is no xi"):
        measure_xi(sim)


def test_the_command_writes_rows_and_a_picture(tmp_path, capsys):
    out = tmp_path / "run"
    options = [
        "--simulate-workers",
        "3",
        "--epochs",
        "2",
        "--batch-size",
        "64",
        "--density",
        "0.02",
    ]
    assert main(["analyse", "convergence", "digits", *options, "--out", str(out)]) == 0
    assert "rows without an entry" in capsys.readouterr().out
    runs = json.loads((out / "convergence.json").read_text())["runs"]
    assert [run["run"] for run in runs] == ["topk", "adtopk"]
    for run in runs:
        assert [look["epoch"] for look in run["epochs"]] == [1, 2]
        for look in run["epochs"]:
            assert look["xi"] > 0 and 0 <= look["score"] <= 1
            assert "6.weight" in look["layers"] and look["rows"] > 128
            assert look["empty_all_dimension"] == 0 < look["empty_global"]
    assert (out / "convergence.png").stat().st_size > 10_000


def test_without_a_compressed_layer_there_is_no_xi(tmp_path, capsys):
    out = tmp_path / "run"
    options = "--tiny --simulate-workers 64 --density 0.05 --epochs 1 --batch-size 4"
    assert main(["analyse", "convergence", "digits", *options.split(), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert "no layer is compressed, so there is no xi; " in said
    assert "among 64 workers stops paying (--no-break-even compresses it all the same)" in said
    assert not out.exists()


def test_what_would_not_pay_is_compressed_if_asked_but_small_layers_are_not(tmp_path):
    out = tmp_path / "run"
    options = "--tiny --simulate-workers 64 --density 0.05 --epochs 1 --batch-size 4 --no-break-even --methods adtopk"
    assert main(["analyse", "convergence", "digits", *options.split(), "--out", str(out)]) == 0
    found = json.loads((out / "convergence.json").read_text())
    assert found["break_even"] is False
    # The others have 36 to 288 elements.
    assert list(found["runs"][0]["epochs"][0]["layers"]) == ["6.weight"]


def test_a_dry_run_shows_the_settings_and_starts_nothing(tmp_path, capsys):
    out = tmp_path / "run"
    options = ["--no-break-even", "--dry-run", "--out", str(out)]
    assert main(["analyse", "convergence", "digits", *options]) == 0
    shown = capsys.readouterr().out
    assert "dense_fallback = false" in shown and "simulate_workers = 8" in shown
    assert not out.exists()


@pytest.mark.parametrize("name", ["dgc", "powersgd", "dense"])
def test_other_methods_are_refused_by_name(name, capsys):
    assert main(["analyse", "convergence", "digits", "--methods", name]) == 2
    assert f"methods names '{name}', for which there is no xi" in capsys.readouterr().err
