"""The whole path of docs/own-method.md, and what becomes of functions that do it wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import thinwire as tw
from tests.pages import ROOT, split_page
from thinwire.cli import main
from thinwire.engine import CheckReport
from thinwire.tools.methods import build_method, keep_taken

PAGE = (ROOT / "docs" / "own-method.md").read_text()
BLOCKS = [block.text for block in split_page(PAGE)[0] if block.language == "python"]


@pytest.fixture
def _sparsifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's file, where the reader is."""
    (tmp_path / "sparsifier.py").write_text(BLOCKS[0])
    (tmp_path / "wrong.py").write_text("NUMBER = 3\ndef make(density): return density\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    yield
    for name in ("sparsifier", "wrong"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("_sparsifier")
def test_the_programs_of_the_page_do_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    _, checked, trained = BLOCKS
    exec(checked, {})
    table = capsys.readouterr().out
    assert table.strip() in PAGE
    found: dict = {}
    exec(trained, found)
    assert found["losses"][-1] < 0.7 * found["losses"][0]
    assert found["simulation"].stats().ratio > 5


@pytest.mark.usefixtures("_sparsifier")
@pytest.mark.parametrize(
    "command",
    [
        "compare digits --tiny --simulate-workers 2 --set run.steps=3 --methods dense,sparsifier:make --density 0.02 --out run",
        "analyse convergence digits --simulate-workers 2 --epochs 1 --batch-size 128 --methods sparsifier:METHOD --out run",
    ],
)
def test_commands_take_an_own_method(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 0, capsys.readouterr().err
    assert "sparsifier:" in capsys.readouterr().out


@pytest.mark.usefixtures("_sparsifier")
def test_an_own_method_is_built_from_its_settings() -> None:
    made = build_method("sparsifier:make", {"density": 0.5})
    assert isinstance(made, tw.Compose) and made.select.density == 0.5
    changed = build_method("sparsifier:METHOD", {"dense_fallback": False})
    assert isinstance(changed, tw.Compose) and changed.dense_fallback is False
    assert keep_taken("sparsifier:METHOD", density=0.1) == {}
    assert keep_taken("sparsifier:make", density=0.1) == {"density": 0.1}


@pytest.mark.usefixtures("_sparsifier")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:METHOD", "there is no module 'nowhere'"),
        ("sparsifier:nothing", "nothing of sparsifier is neither a Method nor a function"),
        ("wrong:NUMBER", "NUMBER of wrong is neither a Method nor a function"),
        ("wrong:make", "a function that returns a Method"),
        ("sparsifier", "or your own as module:attribute"),
    ],
)
@pytest.mark.parametrize("command", ["compare digits --density 0.1", "bench step"])
def test_a_wrong_name_gets_one_sentence(
    command: str, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--methods", name, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert message in said or "wrong:make" in said
    assert said.count("\n") == 1


def largest(rows, k):
    return rows.abs().topk(k).indices


def by_hand(choose, **options) -> CheckReport:
    return tw.check(tw.Compose(select=tw.selector(choose, density=0.05, **options)))


def test_the_largest_of_a_function_are_those_of_topk() -> None:
    gradients = {"weight": torch.randn(40, 64, generator=torch.Generator().manual_seed(0))}
    updates = []
    for select in (tw.selector(largest, density=0.05), tw.select.TradTopK(0.05)):
        model = torch.nn.Linear(64, 40, bias=False)
        simulation = tw.simulate(model, tw.Compose(select=select), workers=2)
        for rank in simulation.ranks:
            with simulation.worker(rank):
                (model.weight * gradients["weight"]).sum().backward()
        simulation.exchange()
        updates.append(model.weight.grad.clone())
    assert updates[0].any() and torch.equal(*updates)


def attach_job(rank: int, world: int) -> float:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    method = tw.Compose(select=tw.selector(largest, density=0.05))
    handle = tw.attach(model, method)
    model(torch.ones(2, 64)).sum().backward()
    handle.close()
    return float(model.module.weight.grad.count_nonzero())


def test_real_ranks_agree_that_they_have_the_same_function(pools) -> None:
    first, second = pools(2).run(attach_job)
    assert first == second > 0
    assert " at 0x" not in repr(tw.selector(largest, density=0.05))


@pytest.mark.parametrize("axis", [None, "auto", 0])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_a_sound_function_keeps_every_contract(axis, world) -> None:
    method = tw.Compose(select=tw.selector(largest, density=0.05, axis=axis))
    report = tw.check(method, world=world)
    assert report and all(row.kept for row in report.rows), report


BROKEN = {
    "selection": lambda rows, k: torch.zeros(len(rows), k, dtype=torch.int64),
    "random state": lambda rows, k: torch.rand_like(rows).topk(k).indices,
    "resume": lambda rows, k: torch.rand_like(rows).topk(k).indices,
}


@pytest.mark.parametrize("contract", BROKEN)
def test_a_contract_that_is_broken_is_named(contract: str) -> None:
    report = by_hand(BROKEN[contract])
    assert not report
    assert contract in [row.contract for row in report.rows if row.kept is False]
    assert "BROKEN" in str(report) and "BROKEN" in report._repr_html_()


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda rows, k: rows[:, :k], "must return a tensor of int64"),
        (lambda rows, k: rows.abs().topk(k + 1).indices, "k of every row"),
        (lambda rows, k: 1 / 0, "ZeroDivisionError"),
        (lambda rows, k: rows.abs().topk(k).indices + 10**6, "out of bounds"),
    ],
)
def test_what_a_function_does_wrong_is_in_the_table(choose, message: str) -> None:
    assert message in str(by_hand(choose))


@pytest.mark.parametrize(
    ("method", "untried"),
    [
        (tw.Dense(), ["compression", "selection"]),
        (tw.DGC(density=0.05), ["conservation"]),
        (tw.PowerSGD(rank=2), ["selection"]),
        (tw.GaussianK(density=tw.warmup([0.1], final=0.05, every=2)), []),
        (tw.TopK(density=0.05, exchange=tw.exchange.Hierarchical(per_host=2)), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_packages_own_methods_keep_the_contracts(method, untried) -> None:
    report = tw.check(method)
    assert report, report
    assert [row.contract for row in report.rows if row.kept is None] == untried


def test_a_method_that_loses_gradients_is_told() -> None:
    report = tw.check(tw.TopK(density=0.05, memory=tw.memory.NoMemory()))
    assert [row.contract for row in report.rows if row.kept is False] == ["conservation"]


def test_wrong_settings_get_one_sentence() -> None:
    with pytest.raises(tw.UsageError, match="function is 3; it must be a function"):
        tw.selector(3, density=0.1)
    with pytest.raises(tw.UsageError, match="density is 0; it must be"):
        tw.selector(largest, density=0)
    with pytest.raises(tw.UsageError, match="axis is 'x'; it must be"):
        tw.selector(largest, density=0.1, axis="x")
    with pytest.raises(tw.UsageError, match="method is 3; it must be a method"):
        tw.check(3)
    with pytest.raises(tw.UsageError, match="world is 0; it must be"):
        tw.check(tw.TopK(), world=0)
    with pytest.raises(tw.UsageError, match="method is AdamScale, which works inside an optimizer"):
        tw.check(tw.AdamScale(method=tw.TopK()))
