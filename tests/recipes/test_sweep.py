"""Sweeps: every combination once, resumed where it was, one table and one page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thinwire.cli import main
from thinwire.errors import UsageError
from thinwire.recipes.sweep import combine, parse_sweep, split_values

BASE = "train digits --tiny --simulate-workers 2 --steps 2 --method topk --density 0.1"


def test_a_sweep_is_resumed_and_ends_with_one_table_and_one_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    swept = "--sweep training.lr=0.1 --seeds 1,2 --link auto"
    assert main(f"{BASE} {swept} --out {out}".split()) == 0
    shown = capsys.readouterr().out
    assert "the workers talk over the loopback: simulated workers" in shown
    (line,) = find_lines(shown)
    assert line[:2] == ["0.1", "topk"] and "±" in line, "two seeds have a spread"
    summary = out / "training.lr=0.1" / "summary.json"
    before = summary.stat().st_mtime_ns
    # All of it is in the folder, so that nothing else has to be said.
    assert main(f"train --resume --out {out}".split()) == 0
    shown = capsys.readouterr().out
    assert "finished already" in shown and find_lines(shown) == [line]
    assert summary.stat().st_mtime_ns == before
    assert "Curves" in (out / "report.html").read_text()
    assert main(["report", str(out), "--out", str(out / "again.html")]) == 0
    assert (out / "again.html").read_text() == (out / "report.html").read_text()


def find_lines(shown: str) -> list[list[str]]:
    """The lines of the table, under its heading."""
    table = shown[shown.rindex("seeds") :].splitlines()
    return [line.split() for line in table if line.startswith(("0.1", "0.2"))]


@pytest.mark.slow
def test_every_combination_is_run_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    first = "--sweep training.lr=0.1 --sweep training.momentum=0,0.9 --seeds 1,2"
    assert main(f"{BASE} {first} --out {out}".split()) == 0
    swept = "--sweep training.lr=0.1,0.2 --sweep training.momentum=0,0.9 --seeds 1,2"
    assert main(f"{BASE} {swept} --out {out} --resume".split()) == 0
    shown = capsys.readouterr().out
    assert shown.count("finished already") == 2 and "job 4 of 4" in shown
    lines = find_lines(shown)
    assert [line[:2] for line in lines] == [
        *(["0.1", "0"], ["0.1", "0.9"], ["0.2", "0"], ["0.2", "0.9"])
    ]
    assert sum("*" in line for line in lines) == 1
    names = json.loads((out / "sweep.json").read_text())["jobs"]
    rows = json.loads((out / names[-1] / "summary.json").read_text())["rows"]
    assert [row["about"]["training"]["momentum"] for row in rows] == [0.9, 0.9]
    assert [row["seed"] for row in rows] == [1, 2]
    page = (out / "report.html").read_text()
    assert all(f"{name}: topk" in page for name in names)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--sweep training.lrr=1,2", "training.lrr is no setting (did you mean lr?)"),
        ("--sweep trainin.lr=1,2", "trainin is no section, there are task, method"),
        ("--sweep method.densty=0.1,0.2", "but topk has no such setting (did you mean density?)"),
        ("--sweep lr=1,2", "it must be section.name=value, such as training.lr=0.1"),
        ("--sweep training.lr=", "name the values, such as training.lr=0.1,0.2"),
        ("--sweep training.lr=1,1", "which has 1 twice"),
        ("--sweep training.lr=1 --sweep training.lr=2", "sweep names training.lr twice"),
        ("--sweep training.lr=0.1,-1", "lr is -1; it must be above 0"),
        ("--sweep training.lr=1 --print-launch torchrun", "leave the launcher out"),
        ("--sweep training.lr=1 --link 50mbit", "link is '50mbit', which cannot be had here"),
    ],
)
def test_a_wrong_sweep_costs_a_sentence_before_anything_runs(
    options: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([*BASE.split(), *options.split(), "--out", str(out)]) == 2
    assert sentence in capsys.readouterr().err and not out.exists()


def test_a_dry_run_lists_the_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared = "compare digits --tiny --methods dense,topk --sweep run.workers=2,4"
    assert main([*compared.split(), "--out", str(tmp_path / "x"), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        *(f"2 jobs, in {tmp_path / 'x'}:", "  run.workers=2", "  run.workers=4")
    ]


def test_values_may_be_lists_and_names_are_those_of_folders() -> None:
    assert split_values("[30, 60],[20], none") == ["[30, 60]", "[20]", "none"]
    parsed = parse_sweep(["training.milestones=[30,60],[20]", "task.data_dir=a/b"])
    first, second = combine(parsed)
    assert first.name != second.name
    assert all("/" not in one.name and len(one.name) < 200 for one in (first, second))
    with pytest.raises(UsageError, match=r"sweep names training\.lr twice"):
        parse_sweep(["training.lr=1", "training.lr=2"])
