"""Real worker processes, started as a user starts them."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from tests.recipes import own_tasks
from tests.recipes.test_output import ROW
from thinwire.cli import main
from thinwire.errors import JobError
from thinwire.observe.metrics import read_metrics
from thinwire.recipes.job import Job, build_job, read_job, write_job
from thinwire.recipes.launch import judge, worker_environment
from thinwire.recipes.worker import hand_over

ROOT = Path(__file__).parents[2]
OWN = own_tasks.__name__


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def make_job(out: Path, workers: int = 2) -> Job:
    settings = {"task": {"name": "digits"}, "run": {"workers": workers}}
    return build_job("train", settings, out=out)


def test_train_digits_for_one_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    handlers = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]
    command = "train digits --method adtopk --density 0.02 --workers 2 --epochs 1 --lr 0.1"
    ledger = tmp_path / "traffic.csv"
    assert main([*command.split(), "--out", str(out), "--ledger", str(ledger)]) == 0
    shown = capsys.readouterr()
    assert "adtopk: step 22/22" in shown.out
    assert "digits, 2 workers, 151,306 parameters" in shown.out
    assert shown.err == ""

    assert sorted(path.name for path in out.iterdir()) == [
        "config.toml",
        "metrics.jsonl",
        "summary.json",
        "training.png",
    ]
    summary = json.loads((out / "summary.json").read_text())
    (row,) = summary["rows"]
    assert row["steps"] == 22
    assert row["replicas_identical"] is True
    assert row["ratio"] > 20
    assert 0.01 < row["density"] < 0.025
    assert summary["job"]["method"] == {"name": "adtopk", "density": 0.02}
    assert row["origin"]["versions"] == summary["versions"]
    assert {"torch", "thinwire", "python"} <= set(summary["versions"])
    assert summary["hardware"]["cores"] >= 1

    steps = [record for record in read_metrics(out / "metrics.jsonl") if record["event"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, 23))
    assert sum(record["wire_bytes"] for record in steps) == 22 * row["wire_bytes_per_step"]
    assert all(record["ms"] > 0 and record["loss"] > 0 for record in steps)

    lines = list(csv.DictReader(ledger.open()))
    assert {(line["run"], line["rank"]) for line in lines} == {("adtopk", "0"), ("adtopk", "1")}
    first = [int(line["sent_bytes"]) for line in lines if line["rank"] == "0"]
    assert sum(first) == 22 * row["wire_bytes_per_step"]
    assert handlers == [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize(
    ("task", "sentence", "left_behind"),
    [
        ("RAISING", "worker 1 of 2 failed: RuntimeError: the cat sat", "raise RuntimeError"),
        ("DYING", "worker 1 of 2 was ended by SIGKILL", ""),
    ],
)
def test_a_worker_that_fails_is_named(
    task: str,
    sentence: str,
    left_behind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    assert main(["train", f"{OWN}:{task}", "--workers", "2", "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"thinwire train: {sentence}")
    assert said.count("\n") == 1
    assert str(out / "worker1-error.txt") in said
    assert left_behind in (out / "worker1-error.txt").read_text()
    assert not (out / "summary.json").exists()


def test_what_only_a_worker_can_know_is_wrong_is_still_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"train {OWN}:TINY --workers 2 --batch-size 100 --out {tmp_path / 'run'}"
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("thinwire train: batch_size is 100 on 2 workers; together they must")
    assert said.count("\n") == 1
    # The corrected command may name the same folder.
    assert not (tmp_path / "run").exists()


def test_workers_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    command = f"train {OWN}:WAITING --workers 2 --data-dir {tmp_path} --out {tmp_path / 'run'}"
    launcher = subprocess.Popen([sys.executable, "-m", "thinwire", *command.split()])
    try:
        wait_until(lambda: len(list(tmp_path.glob("worker*"))) == 2)
        locks = [path.open() for path in tmp_path.glob("worker*")]
        assert not any(map(is_free, locks))
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(lambda: all(map(is_free, locks)))


def is_free(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_under_torchrun_the_command_is_the_worker(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = f"compare {OWN}:TINY --methods dense,topk --density 0.1 --out {tmp_path / 'run'}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "thinwire", *command.split()],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        shown = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], shown
    assert "topk: step 18/18" in shown[0][0]
    assert "2 workers" in shown[0][0]
    assert shown[1][0] == ""
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [row["method"] for row in summary["rows"]] == ["dense", "topk"]
    assert (tmp_path / "run" / "comparison.png").exists()


def test_results_count_more_than_an_exit_code(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    hand_over(tmp_path, 0, [ROW])
    with pytest.raises(JobError, match="worker 1 of 2 left no result"):
        judge(job, tmp_path, {})
    hand_over(tmp_path, 1, [ROW])
    aborted = _failure(tmp_path, rank=1, exit_code=-signal.SIGABRT)
    assert judge(job, tmp_path, {1: aborted}) == [ROW]


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    write_job(tmp_path / "job.json", job)
    assert read_job(tmp_path / "job.json") == job


def test_cores_are_shared_and_the_users_setting_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with worker_environment(10_000):
        assert os.environ["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with worker_environment(4):
        assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["OMP_NUM_THREADS"] == "3"


def _failure(folder: Path, rank: int, exit_code: int):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    return ProcessFailure(
        local_rank=rank, pid=1, exitcode=exit_code, error_file=str(folder / "none")
    )
