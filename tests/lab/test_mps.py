from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from thinwire.errors import UsageError
from thinwire.lab import clean, mps
from thinwire.lab.records import Record, process_start

# Behaves as NVIDIA's control program does: -d leaves a daemon, "quit" on its input ends it.
FAKE_CONTROL = """#!/bin/sh
pid_file=$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid
if [ "$1" = -d ]; then
    setsid sleep 300 > /dev/null 2>&1 < /dev/null &
    echo $! > $pid_file
else
    read word
    [ "$word" = quit ] && kill $(cat $pid_file)
fi
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / mps.CONTROL
    program.parent.mkdir()
    program.write_text(FAKE_CONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def daemon_of(record: Record) -> int:
    folder = Path(mps.mps_environment(record)["CUDA_MPS_PIPE_DIRECTORY"])
    return int((folder / "nvidia-cuda-mps-control.pid").read_text())


def is_running(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while process_start(pid) is not None:
        if time.monotonic() > deadline:
            return True
        time.sleep(0.01)
    return False


def test_the_daemon_lives_as_long_as_the_lab(control: None) -> None:
    record = Record.open("tw00000001", "10.64.0.0/24")
    mps.start_mps(record)
    pid = daemon_of(record)
    assert process_start(pid) is not None
    mps.stop_mps(record)
    assert not is_running(pid)
    assert mps.mps_environment(record) == {}
    record.close()


@pytest.mark.root
def test_clean_stops_the_daemon_of_a_killed_lab(control: None) -> None:
    record = Record.open("tw00000002", "10.64.0.0/24")
    mps.start_mps(record)
    pid = daemon_of(record)
    record.owner_started = 1
    record.save()
    assert clean() == ["tw00000002"]
    assert not is_running(pid)


def test_mps_where_there_is_none_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    record = Record.open("tw00000003", "10.64.0.0/24")
    with pytest.raises(UsageError, match="nvidia-cuda-mps-control is not on the PATH"):
        mps.start_mps(record)
    record.close()
