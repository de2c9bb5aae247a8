"""Real worker processes, started as a user starts them."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from tests.lanes import slow
from tests.recipes import own_tasks
from tests.tools.test_output import ROW
from thinwire.cli import main
from thinwire.errors import JobError, UsageError
from thinwire.recipes.job import Job, build_job, read_job, write_job
from thinwire.recipes.launch import collect_rows
from thinwire.recipes.worker import hand_over, hand_over_failure
from thinwire.tools.metrics import read_metrics
from thinwire.tools.processes import worker_environments

ROOT = Path(__file__).parents[2]
OWN = own_tasks.__name__


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def make_job(out: Path, workers: int = 2) -> Job:
    settings = {"task": {"name": "digits"}, "run": {"workers": workers}}
    return build_job("train", settings, out=out)


@pytest.mark.slow
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
        "report.html",
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
        # What is left behind by these is judged below; the processes that leave it, in `make slow`.
        slow("DYING", "worker 1 of 2 was ended by SIGKILL", ""),
        slow("STOPPING", "worker 1 of 2 gave no answer for 5 s", ""),
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
    timeout = 5 if task == "STOPPING" else 60
    assert main(f"train {OWN}:{task} --workers 2 --timeout {timeout} --out {out}".split()) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"thinwire train: {sentence}")
    assert said.count("\n") == 1
    assert str(out / "worker1-error.txt") in said
    assert left_behind in (out / "worker1-error.txt").read_text()
    assert not (out / "summary.json").exists()


@pytest.mark.slow
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


# tests/tools/test_warden.py has the same of processes without torch.
@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_workers_end_with_a_launcher_that_is_killed(tmp_path: Path, stopped: bool) -> None:
    command = f"train {OWN}:LOADING --workers 2 --data-dir {tmp_path} --out {tmp_path / 'run'}"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "thinwire", *command.split()],
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    try:
        wait_until(lambda: len(list(tmp_path.glob("worker*"))) == 2)
        locks = [path.open() for path in tmp_path.glob("worker*")]
        assert not any(map(is_free, locks))
        for lock in locks if stopped else ():
            os.kill(int(lock.read()), signal.SIGSTOP)
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(lambda: all(map(is_free, locks)))
    wait_until(lambda: not list(scratch.glob("thinwire-*")))


# -- what is open ------------------------------------------------------------------------------------------------


def listening_addresses(pid: int) -> set[str]:
    """The addresses at which a process listens, as the kernel writes them: 127.0.0.1 is 0100007F."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}


# That workers are told so is a case of `make test`: test_workers_of_one_machine_are_told_to_use_the_loopback.
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's tables")
def test_a_job_of_one_machine_listens_on_the_loopback_only(tmp_path: Path) -> None:
    """Not even the workers' own network is open, whatever interface the user has named for others."""
    command = f"train {OWN}:WAITING --workers 2 --data-dir {tmp_path} --out {tmp_path / 'run'}"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "thinwire", *command.split()],
        env={**os.environ, "TMPDIR": str(scratch), "GLOO_SOCKET_IFNAME": "eth0"},
    )
    try:
        wait_until(lambda: len(list(tmp_path.glob("at-work*"))) == 2)
        workers = [int(path.read_text()) for path in tmp_path.glob("at-work*")]
        assert listening_addresses(launcher.pid) == set()
        found = [listening_addresses(pid) for pid in workers]
        assert all(addresses and addresses <= LOOPBACK for addresses in found)
        (folder,) = scratch.glob("thinwire-*")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (folder / "store").is_file()
        (tmp_path / "go-on").touch()
        assert launcher.wait(120) == 0
    finally:
        launcher.kill()
        launcher.wait()


def is_free(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_until(happened: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
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
        shown = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], shown
    assert f"workers meet at 127.0.0.1:{port} and talk over ports" in shown[0][0]
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
        collect_rows(job, tmp_path, [0, None])
    hand_over(tmp_path, 1, [ROW])
    assert collect_rows(job, tmp_path, [0, -signal.SIGABRT]) == [ROW]


def leave_failure(folder: Path, rank: int, error: Exception) -> None:
    try:
        raise error
    except Exception as raised:
        hand_over_failure(folder, rank, raised)


LOST = RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    ("failures", "codes", "sentence"),
    [
        ({1: ValueError("too\nlate"), 0: LOST}, [1, 1], "worker 1 of 2 failed: ValueError: too"),
        ({0: LOST}, [1, -signal.SIGKILL], "worker 1 of 2 was ended by SIGKILL"),
        ({0: LOST}, [1, None], "worker 1 of 2 gave no answer for 300 s"),
        ({}, [0, 5], "worker 0 of 2 ended with exit code 0 and no result"),
    ],
    ids=["raised", "killed", "stopped", "silent"],
)
def test_who_failed_is_told_from_what_workers_leave(
    failures: dict[int, Exception], codes: list[int | None], sentence: str, tmp_path: Path
) -> None:
    job = make_job(tmp_path / "run")
    job.out.mkdir()
    for rank, error in failures.items():
        leave_failure(tmp_path, rank, error)
    (tmp_path / "worker1.log").write_text("last words")
    with pytest.raises(JobError) as caught:
        collect_rows(job, tmp_path, codes)
    assert str(caught.value).startswith(sentence)
    (told,) = job.out.iterdir()
    assert str(told) in str(caught.value)
    if 1 in failures:
        assert "ValueError: too" in told.read_text()
    elif failures:
        assert told.read_text() == "last words"


def test_what_a_worker_refuses_is_its_sentence(tmp_path: Path) -> None:
    leave_failure(tmp_path, 1, UsageError("batch_size is 100 on 2 workers"))
    with pytest.raises(UsageError, match=r"^batch_size is 100 on 2 workers$"):
        collect_rows(make_job(tmp_path), tmp_path, [None, 2])


@pytest.mark.skipif(sys.platform != "linux", reason="names Linux's loopback")
def test_workers_of_one_machine_are_told_to_use_the_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever interface the user has named for others."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    for environment in worker_environments(2):
        assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == "lo"


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    write_job(tmp_path / "job.json", job)
    assert read_job(tmp_path / "job.json") == job


def test_cores_are_shared_and_the_users_setting_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environments = worker_environments(10_000)
    assert {environment["OMP_NUM_THREADS"] for environment in environments} == {"1"}
    assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert worker_environments(4)[3]["OMP_NUM_THREADS"] == "3"
