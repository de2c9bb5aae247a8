"""Runs that are stopped, resumed, tested and compared, as a user types them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipes import own_tasks
from thinwire.cli import main
from thinwire.tools.metrics import read_metrics

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


# tests/recipes/test_checkpoints.py has it of two.
@pytest.mark.slow
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
    assert 0 < events.Scalars("thinwire/density")[0].value < 1


def read_wandb(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format behind seven bytes."""
    data, at, record = path.read_bytes(), 7, b""
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.slow
def test_a_run_writes_what_wandb_keeps_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed, so its files cannot be read")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    out = tmp_path / "run"
    common = f"train {TINY} --workers 1 --checkpoint-every 3 --wandb --out {out}"
    assert main(f"{common} --steps 3".split()) == 0
    assert main(f"train --resume --steps 5 --out {out}".split()) == 0
    seen: dict[str, list[int]] = {}
    files = sorted(out.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({path.name for path in files}) == 1, "one run, begun twice"
    for path in files:
        for content in read_wandb(path):
            record = Record.FromString(content)
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                seen.setdefault(name, []).append(record.history.step.num)
    assert seen["train/loss"] == [1, 2, 3, 4, 5]
    assert seen["test/top1"] == seen["thinwire/ratio"] == [3, 5]


@pytest.mark.slow
def test_a_run_writes_what_mlflow_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip(
        "mlflow.tracking", reason="mlflow is not installed, so its store cannot be read"
    )
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    out = tmp_path / "run"
    common = f"train {TINY} --workers 1 --checkpoint-every 3 --mlflow --out {out}"
    assert main(f"{common} --steps 3".split()) == 0
    assert main(f"train --resume --steps 5 --out {out}".split()) == 0
    client = tracking.MlflowClient((out / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("thinwire")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "adtopk" and run.data.params["method.name"] == "adtopk"
    steps = [one.step for one in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(steps) == [1, 2, 3, 4, 5]
    assert 0 < run.data.metrics["thinwire/density"] < 1


def test_the_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--list"]) == 0
    shown = capsys.readouterr().out
    for name in ("cifar10-resnet20", "wikitext2-lstm", "--data: digits", "--model: ", "wm5o"):
        assert name in shown
