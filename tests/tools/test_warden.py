"""The warden ends what a killed launcher leaves, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from thinwire.tools import warden
from thinwire.tools.warden import Warden, began

SLEEPER = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
LAUNCHER = """
import os, subprocess, sys
from pathlib import Path
from thinwire.tools.warden import Warden
worker = subprocess.Popen(sys.argv[2:], start_new_session=True)
with Warden(Path(sys.argv[1])) as warden:
    warden.guard(worker)
    print(worker.pid, warden.process.pid, flush=True)
    sys.stdin.read()
"""


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while any(began(pid) for pid in pids if not is_zombie(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_launcher_takes_its_workers_along(tmp_path: Path, stopped: bool) -> None:
    """However early it is: the worker here never gets to look for its parent."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    (folder / "job.json").touch()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder), *SLEEPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    pids = [int(word) for word in launcher.stdout.readline().split()]
    if stopped:
        os.kill(pids[0], 19)
    launcher.kill()
    launcher.wait()
    wait_until_gone(pids)
    assert not folder.exists()


def test_a_launcher_that_ends_well_is_left_alone(tmp_path: Path) -> None:
    worker = subprocess.Popen(SLEEPER, start_new_session=True)
    try:
        with Warden(tmp_path) as watching:
            watching.guard(worker)
        assert watching.process.returncode == 0
        assert worker.poll() is None and tmp_path.exists()
    finally:
        worker.kill()
        worker.wait()


def test_a_number_that_became_another_process_is_spared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(["1", "2"])
    monkeypatch.setattr(warden, "began", lambda pid: next(times))
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: killed.append(pid))
    folder = tmp_path / "scratch"
    folder.mkdir()
    warden.main(str(folder), ["123\n"])
    assert killed == [] and not folder.exists()
