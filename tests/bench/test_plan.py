"""`thinwire plan`: from a model, a file, and a command that trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import free_port
from tests.plan.test_decision import describe
from thinwire.cli import main
from thinwire.plan import Profile


def test_a_saved_profile_is_planned_for_any_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    describe().save(path)
    assert main(["plan", str(path), "--rate", "100gbit", "--optimizer", "adam"]) == 0
    assert "do not compress" in capsys.readouterr().out
    out = tmp_path / "pictures"
    options = ["--rate", "1gbit", "--workers", "16", "--optimizer", "adam"]
    assert main(["plan", str(path), *options, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "int4" in shown and "chosen" in shown and "predicted" in shown
    pictures = {"timeline.png", "rates.png", "who-wins.png"}
    assert {one.name for one in out.iterdir()} == {*pictures, "plan.json", "report.html"}


def test_a_model_is_measured_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept.json"
    options = ["--rate", "100mbit", "--device", "cpu", "--quality", "safe", "--save", str(kept)]
    assert main(["plan", "small", *options]) == 0
    assert "a step without communication takes" in capsys.readouterr().out
    assert main(["plan", str(kept), "--rate", "400gbit"]) == 0


SCRIPT = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
import thinwire as tw

def work(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    ddp = DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    tw.attach(ddp, tw.Auto(measure_steps=3), optimizer=optimizer)
    for _ in range(1000):
        optimizer.zero_grad()
        ddp(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
    os._exit(0)

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""


def test_a_command_runs_until_it_is_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "store")]
    assert main(["plan", "--rate", "10gbit", "--", *command]) == 0
    assert "dense" in capfd.readouterr().out


@pytest.mark.slow
def test_real_workers_measure_their_own_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under torchrun, as a user starts it; what it saves is planned for other links."""
    kept = tmp_path / "measured.json"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--master-port", str(free_port())]
    options = ["--measure", "--batch", "2", "--quality", "fastest", "--save", str(kept)]
    found = subprocess.run(
        [sys.executable, *launcher, "-m", "thinwire", "plan", "small", "--device", "cpu", *options],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "chosen" in found.stdout and "candidate" in found.stdout
    profile = Profile.load(kept)
    assert profile.world == 2 and profile.prices is not None
    assert main(["plan", str(kept), "--rate", "100mbit", "--workers", "8"]) == 0
    shown = capsys.readouterr().out
    assert "8 workers, links of 100mbit" in shown


def test_local_steps_are_offered_where_every_step_would_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    describe().save(path)
    options = ["--optimizer", "adam", "--quality", "fastest"]
    assert main(["plan", str(path), "--rate", "1mbit", *options]) == 0
    shown = capsys.readouterr().out
    assert "tw.LocalSteps" in shown and "changes the optimisation" in shown
    assert main(["plan", str(path), "--rate", "10gbit", *options]) == 0
    assert "LocalSteps" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a model"),
        (["nothing.json"], "there is no such file"),
        (["small", "--rate", "fast"], 'rate is "fast"'),
        (["small", "--measure"], "use torchrun"),
    ],
)
def test_what_cannot_be_planned_is_said(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err
