"""Checkpoints that were cut short, flipped or could not be written: the newest whole one is taken, the damaged one named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lanes import slow
from tests.recipes import own_tasks
from thinwire.cli import main
from thinwire.errors import JobError, UsageError
from thinwire.recipes.checkpoints import Checkpoints
from thinwire.recipes.job import build_job
from thinwire.recipes.parallel import ProcessWorkers
from thinwire.recipes.report import find_finished
from thinwire.recipes.sealed import DamagedFile, check_seal, load_sealed, save_sealed
from thinwire.recipes.simulated import SimulatedWorkers

ROOT = Path(__file__).parents[2]
TINY = f"{own_tasks.__name__}:TINY"
STATE = {"world": 1, "processes": 1, "step": 0, "model": {"weight": torch.arange(100.0)}}


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def make_checkpoints(folder: Path) -> tuple[Checkpoints, list[str]]:
    said: list[str] = []
    workers = SimulatedWorkers(1, torch.device("cpu"), graph=False)
    return Checkpoints(folder, workers, 1, said.append), said


def save_three(folder: Path) -> tuple[Checkpoints, list[str]]:
    checkpoints, said = make_checkpoints(folder)
    for step in (1, 2, 3):
        checkpoints.save(step, {**STATE, "step": step})
    return checkpoints, said


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_seal(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGES = [cut_short, cut_seal, empty, flip]


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_whole_one_is_taken_and_the_damaged_one_named(damage, tmp_path: Path) -> None:
    checkpoints, said = save_three(tmp_path)
    newest = tmp_path / "step00000003-process0.pt"
    damage(newest)
    state = checkpoints.load_latest()
    assert state is not None and state["step"] == 2
    (sentence,) = said
    assert sentence.startswith(f"the checkpoint {newest} is damaged (")


def load_damaged(rank: int, world: int, folder: str) -> tuple[int, list[str]]:
    said: list[str] = []
    workers = ProcessWorkers(torch.device("cpu"))
    checkpoints = Checkpoints(Path(folder), workers, 1, said.append)
    for step in (1, 2, 3):
        checkpoints.save(step, {**STATE, "world": world, "processes": world, "step": step})
    if rank == 1:
        flip(Path(folder) / "step00000003-process1.pt")
    state = checkpoints.load_latest()
    assert state is not None
    return state["step"], said


def test_all_processes_take_the_same_one(pools, tmp_path: Path) -> None:
    for step, (sentence,) in pools(2).run(load_damaged, str(tmp_path)):
        assert step == 2 and "step00000003-process1.pt is damaged" in sentence


def test_only_damaged_ones_are_refused(tmp_path: Path) -> None:
    checkpoints, said = save_three(tmp_path)
    for path in tmp_path.glob("step*"):
        flip(path)
    with pytest.raises(UsageError, match=r"only damaged checkpoints in .* remove them to start"):
        checkpoints.load_latest()
    assert len(said) == 3


def test_a_damaged_best_one_is_not_taken(tmp_path: Path) -> None:
    checkpoints, said = make_checkpoints(tmp_path)
    checkpoints.save_best(STATE)
    assert checkpoints.load_best() is not None
    flip(tmp_path / "best-process0.pt")
    assert checkpoints.load_best() is None and "best-process0.pt is damaged" in said[0]


def test_every_flipped_bit_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    save_sealed(path, {"weight": torch.zeros(8)})
    whole = path.read_bytes()
    assert torch.equal(load_sealed(path)["weight"], torch.zeros(8))
    for place in range(0, 8 * len(whole), 7):
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)
        with pytest.raises(DamagedFile):
            check_seal(path)


def test_what_a_killed_process_left_goes_with_the_next_save(tmp_path: Path) -> None:
    checkpoints, _ = make_checkpoints(tmp_path)
    left = tmp_path / ".step00000041-process0.pt.0123"
    others = tmp_path / ".step00000041-process1.pt.0123"
    best = tmp_path / ".best-process0.pt.4567"
    for path in (left, others, best):
        path.touch()
    checkpoints.save(42, STATE)
    assert not left.exists() and not best.exists() and others.exists()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    checkpoints, _ = make_checkpoints(tmp_path / "file" / "below")
    with pytest.raises(JobError, match=r"cannot be written \(Not a directory\); those"):
        checkpoints.save(1, STATE)


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
def test_a_full_disk_is_one_sentence_and_the_others_are_kept(tmp_path: Path) -> None:
    import resource

    checkpoints, _ = save_three(tmp_path)
    saved = {path: path.read_bytes() for path in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(
            JobError, match=r"cannot be written \(File too large\); those"
        ) as caught:
            checkpoints.save(4, {**STATE, "step": 4})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "that were there are kept" in str(caught.value)
    assert saved == {path: path.read_bytes() for path in tmp_path.iterdir()}


# -- as a user meets them ----------------------------------------------------------------------------------------


def train(*words: str, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """With files of at most `limit` bytes, beyond which the system refuses to write as a full disk does."""
    command = [sys.executable, "-m", "thinwire", "train", *words]
    if limit is not None:
        code = f"import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({limit}, {limit}))"
        code += "; from thinwire.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, "train", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_resume_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    begin = f"{TINY} --simulate-workers 2 --steps 4 --checkpoint-every 2 --out {out}".split()
    assert train(*begin).returncode == 0
    saved = {path: path.read_bytes() for path in (out / "checkpoints").rglob("*.pt")}
    full = train("--resume", "--out", str(out), "--steps", "8", limit=3000)
    assert full.returncode == 1, full.stderr
    (said,) = full.stderr.splitlines()
    assert "cannot be written (File too large)" in said and "that were there are kept" in said
    assert saved == {path: path.read_bytes() for path in (out / "checkpoints").rglob("*.pt")}
    again = train("--resume", "--out", str(out), "--steps", "8")
    assert again.returncode == 0, again.stderr
    assert "adtopk: 8 steps, 4 of them done" in again.stdout


def read_row(out: Path) -> dict[str, Any]:
    (row,) = json.loads((out / "summary.json").read_text())["rows"]
    return row


def test_simulated_workers_say_what_they_cost_and_resume_names_what_is_damaged_or_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    begin = f"train {TINY} --simulate-workers 2 --steps 4 --checkpoint-every 2 --out {out}"
    assert main(begin.split()) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("simulated 2")]
    assert "MB beside the model's" in line and "ms exchanging per step" in line
    costs = read_row(out)["simulation"]
    assert costs["steps"] == 4 and costs["workers"] == 2 and costs["gradient_bytes"] > 0
    damaged = out / "checkpoints" / "adtopk" / "step00000004-process0.pt"
    flip(damaged)
    capsys.readouterr()
    resume = f"train --resume --out {out} --steps 6"
    assert main(resume.split()) == 0
    shown = capsys.readouterr().out
    assert f"adtopk: the checkpoint {damaged} is damaged" in shown
    assert "adtopk: 6 steps, 2 of them done" in shown
    # The seconds of a resumed run are of the steps since then.
    assert read_row(out)["simulation"]["steps"] == 4

    flip(out / "checkpoints" / "adtopk" / "best-process0.pt")
    assert main(f"train --resume --evaluate --out {out}".split()) == 2
    assert "best-process0.pt is damaged" in capsys.readouterr().err

    for path in out.rglob("*.pt"):
        path.unlink()
    (out / "summary.json").unlink()
    assert main(resume.split()) == 0
    assert "there is no checkpoint in " in (shown := capsys.readouterr().out)
    assert "so it starts anew" in shown and "adtopk: 6 steps\n" in shown


DAMAGED = [b'{"run": 7}\n', b"\xff\x00\n", b"[" * 100_000 + b"\n", b"7\n"]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_summary_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_bytes(content)
    settings = {"task": {"name": "digits"}, "run": {"workers": 1}}
    with pytest.raises(UsageError, match=r"summary\.json.*damaged.*remove"):
        find_finished(build_job("train", settings, out=tmp_path, resume=True))
    assert (tmp_path / "summary.json").read_bytes() == content


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("metrics.jsonl", content) for content in DAMAGED),
        # Found by a worker that has to be started for it.
        *(slow("summary.json", content) for content in DAMAGED),
    ],
)
def test_a_damaged_record_is_found_before_the_run(
    name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / name).write_bytes(content)
    command = f"train {TINY} --simulate-workers 1 --steps 2 --resume --out {out}"
    assert main(command.split()) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert name in said and "damaged" in said and "remove" in said
    assert (out / name).read_bytes() == content
