"""`thinwire launch`: files for scripts of the user's own, and one that really runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.cli import main
from thinwire.tools.launch_files import KINDS

SCRIPT = """
import os, sys
# In one piece: two workers write to the same pipe.
words = [os.environ["RANK"], os.environ["WORLD_SIZE"], *sys.argv[1:]]
sys.stdout.write(" ".join(words) + "\\n")
"""
TRAINING = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import thinwire as tw

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Linear(256, 64))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
handle = tw.attach(ddp, tw.TopK(density=0.01), optimizer=optimizer)
for _ in range(3):
    optimizer.zero_grad()
    ddp(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} workers, {handle.stats().ratio > 1}")
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a script in it, and the programs of a cluster as they would be on one machine."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    for name, text in (("srun", 'shift; exec "$@"'), ("scontrol", "echo localhost")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_file(folder: Path) -> str:
    ended = subprocess.run(
        ["bash", "job.sh"],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_ID": str(os.getpid()),
            "PBS_NODEFILE": str(folder / "hosts.pbs"),
            "PBS_JOBID": f"{os.getpid()}.server",
        },
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def write_file(kind: str, *command: str) -> None:
    where = ["--hosts", "hosts"] if kind == "torchrun" else ["--workers", "2"]
    options = [*where, "--interface", "lo", "--data", "train.py", "--out", "job.sh"]
    assert main(["launch", kind, *options, "--", *command]) == 0


def test_a_script_of_ones_own_really_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_file("torchrun", "python", "train.py", "--lr", "0.1", "a b")
    assert capsys.readouterr().err == "bash job.sh starts it\n"
    assert sorted(run_file(folder).splitlines()) == ["0 2 --lr 0.1 a b", "1 2 --lr 0.1 a b"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_compressed_training_really_runs(folder: Path, kind: str) -> None:
    (folder / "train.py").write_text(TRAINING)
    (folder / "hosts.pbs").write_text("localhost\nlocalhost\n")
    write_file(kind, "python3", "train.py")
    assert run_file(folder) == "2 workers, True\n"


def test_modules_and_thinwire_itself_are_commands_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "slurm", "--", "python", "-m", "json.tool", "x"]) == 0
    assert "    -m json.tool x\n" in capsys.readouterr().out
    assert main(["launch", "slurm", "--", "thinwire", "train", "digits"]) == 0
    assert f"{sys.executable} -m torch.distributed.run" in (shown := capsys.readouterr().out)
    assert "    -m thinwire train digits\n" in shown
    assert main(["launch", "slurm", "--", "/opt/env/bin/python3.12", "train.py"]) == 0
    assert "/opt/env/bin/python3.12 -m torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "launcher is ''; it must be one of 'slurm'"),
        ("lsf -- python train.py", "launcher is 'lsf'"),
        ("slurm", "the command is missing"),
        ("slurm -- ./train.sh", "the command is './train.sh'"),
        ("slurm -- python", "python is followed by nothing"),
        ("slurm -- python -c 1", "python is followed by '-c'"),
        ("slurm -- python gone.py", "the script is 'gone.py'"),
        ("slurm -- python -m gone_module", "the module is 'gone_module'"),
        ("torchrun -- python train.py", "there are no hosts"),
        ("slurm --time soon -- python train.py", "time is 'soon'"),
        ("torchrun --hosts hosts --time 1:00:00 -- python train.py", "no queue to ask"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_cannot_work_is_one_sentence(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *words.split()]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
