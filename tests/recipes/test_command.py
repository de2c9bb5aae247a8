"""Runs that are stopped, resumed, tested and compared, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.recipes import own_tasks
from thinwire.cli import main
from thinwire.observe.metrics import read_metrics

ROOT = Path(__file__).parents[2]
TINY = f"{own_tasks.__name__}:TINY"
STEPS = 2 * (150 // 8)


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def read_rows(out: Path) -> list[dict]:
    return json.loads((out / "summary.json").read_text())["rows"]


def test_stop_resume_and_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    begin = f"train {TINY} --workers 1 --checkpoint-every 4 --deterministic --steps 10 --out {out}"
    assert main(begin.split()) == 0
    assert read_rows(out)[0]["steps"] == 10
    assert read_rows(out)[0]["simulation"] is None

    # The rest of the settings is in the folder.
    assert main(f"train --resume --out {out} --steps 1000".split()) == 0
    shown = capsys.readouterr().out
    assert f"adtopk: {STEPS} steps, 10 of them done" in shown
    (row,) = read_rows(out)
    assert row["steps"] == STEPS
    assert [step for step, _ in row["tests"]] == [10, STEPS // 2, STEPS]
    steps = [r["step"] for r in read_metrics(out / "metrics.jsonl") if r["event"] == "step"]
    assert steps == list(range(1, STEPS + 1))

    assert main(f"train --resume --evaluate --out {out}".split()) == 0
    shown = capsys.readouterr().out
    assert f"adtopk: top1 {row['score']:.1%}, top5 100.0% after step {STEPS}" in shown
    assert read_rows(out) == [row]

    settings = (out / "config.toml").read_text()
    assert main(f"train --resume --out {out} --lr 0.3".split()) == 2
    assert "training.lr is 0.3 now and was 0.1 when adtopk in" in capsys.readouterr().err
    # What was refused must not be what the next --resume finds.
    assert (out / "config.toml").read_text() == settings


def test_compare_does_only_what_is_not_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    common = f"{TINY} --simulate-workers 2 --density 0.1,0.2 --steps 4 --out {out}"
    assert main(f"compare {common} --methods dense,topk --seed 0,1".split()) == 0
    first = read_rows(out)
    assert [row["run"] for row in first] == [
        "dense#0", "dense#1", "topk@0.1#0", "topk@0.1#1", "topk@0.2#0", "topk@0.2#1",
    ]  # fmt: skip
    assert "±" in capsys.readouterr().out

    assert main(f"compare --resume --out {out} --methods dense,topk,adtopk".split()) == 0
    shown = capsys.readouterr().out
    assert "dense#0: " not in shown
    assert "adtopk@0.2#1: 4 steps" in shown
    assert "2 simulated workers" in shown
    again = read_rows(out)
    assert again[:6] == first
    assert [row["run"] for row in again[6:]] == [
        "adtopk@0.1#0", "adtopk@0.1#1", "adtopk@0.2#0", "adtopk@0.2#1",
    ]  # fmt: skip


def test_simulated_workers_say_what_they_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    common = f"train {TINY} --simulate-workers 3 --checkpoint-every 2 --out {out}"
    assert main(f"{common} --steps 4".split()) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("simulated 3")]
    assert "MB beside the model's" in line and "ms exchanging per step" in line
    costs = read_rows(out)[0]["simulation"]
    assert costs["steps"] == 4 and costs["workers"] == 3 and costs["gradient_bytes"] > 0
    # The seconds of a resumed run are of the steps since then.
    assert main(f"train --resume --out {out} --steps 6".split()) == 0
    assert read_rows(out)[0]["simulation"]["steps"] == 2


def test_a_run_writes_what_tensorboard_reads(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command = f"train {TINY} --workers 1 --steps 3 --tensorboard --out {tmp_path / 'run'}"
    assert main(command.split()) == 0
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "adtopk"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]
    assert [event.step for event in events.Scalars("test/top1")] == [3]


def test_the_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--list"]) == 0
    shown = capsys.readouterr().out
    for name in ("cifar10-resnet20", "wikitext2-lstm", "--data: digits", "--model: ", "wm5o"):
        assert name in shown
