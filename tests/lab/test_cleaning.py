from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab.conftest import names_left
from thinwire.errors import UsageError
from thinwire.lab import Lab, LabSpec, clean
from thinwire.lab.processes import namespace_inode, pids_inside
from thinwire.lab.records import Record, load_records, process_start

OWNER = Path(__file__).with_name("owner.py")
DEAD = {"owner": 1, "owner_started": -1}


@contextmanager
def started_owner() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a process that owns a lab with two sleeping ranks; yield it and the lab's name."""
    process = subprocess.Popen([sys.executable, str(OWNER)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        name = process.stdout.readline().strip()
        for _ in range(2):
            assert process.stdout.readline().endswith("up\n")
        yield process, name
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cleans_up(number: signal.Signals) -> None:
    with started_owner() as (process, name):
        process.send_signal(number)
        process.wait(timeout=60)
        assert process.returncode in (128 + number, -number)
        assert names_left(name) == []


@pytest.mark.root
def test_a_killed_owner_takes_its_ranks_along_and_clean_removes_the_rest() -> None:
    with started_owner() as (process, name):
        with pytest.raises(UsageError, match=f"in use by process {process.pid}"):
            clean([name])
        assert clean() == []
        process.kill()
        process.wait()
        inodes = [namespace_inode(left) for left in names_left(name)]
        assert len(inodes) == 3
        deadline = time.monotonic() + 30
        while pids_inside([inode for inode in inodes if inode]) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert pids_inside([inode for inode in inodes if inode]) == []
        assert clean() == [name]
        assert names_left(name) == []
        assert clean() == []


@pytest.mark.root
def test_names_that_no_lab_created_are_refused(run_dir: Path) -> None:
    foreign = f"foreign-{os.getpid()}"
    with foreign_namespace(foreign):
        with pytest.raises(UsageError, match="not a lab that thinwire created"):
            clean([foreign])
        forge(run_dir, "tw0000000a", {foreign: namespace_inode(foreign)})
        with pytest.raises(UsageError, match="is not one of lab tw0000000a"):
            clean()
        assert namespace_inode(foreign) is not None
        (run_dir / "tw0000000a.json").unlink()


@pytest.mark.root
def test_a_namespace_that_somebody_made_anew_is_refused(run_dir: Path) -> None:
    name = "tw0000000b-host1"
    with foreign_namespace(name):
        inode = namespace_inode(name)
        assert inode is not None
        forge(run_dir, "tw0000000b", {name: inode + 1})
        with pytest.raises(UsageError, match="was not created by lab tw0000000b"):
            clean()
        assert namespace_inode(name) == inode
        (run_dir / "tw0000000b.json").unlink()


@pytest.mark.root
def test_a_forked_child_does_not_clean_up_its_parents_lab() -> None:
    with Lab(LabSpec(hosts=1)) as lab:
        pid = os.fork()
        if pid == 0:
            lab.__exit__(None, None, None)
            os._exit(0)
        os.waitpid(pid, 0)
        assert len(names_left(lab.name)) == 2


def test_a_record_knows_whether_its_owner_lives() -> None:
    record = Record.open("tw0000000c", "10.64.0.0/24")
    with pytest.raises(FileExistsError):
        Record.open("tw0000000c", "10.64.1.0/24")
    assert [found.owner_alive for found in load_records()] == [True]
    record.owner_started += 1  # the same process id, given to another process
    record.save()
    assert [found.owner_alive for found in load_records()] == [False]
    record.close()
    assert load_records() == []
    assert process_start(2**22 + 1) is None


@contextmanager
def foreign_namespace(name: str) -> Iterator[None]:
    """Have a namespace that thinwire knows nothing about."""
    netns = pytest.importorskip("pyroute2.netns")
    netns.create(name)
    try:
        yield
    finally:
        netns.remove(name)


def forge(run_dir: Path, lab: str, namespaces: dict[str, int | None]) -> None:
    """Write the record of a lab whose owner is dead."""
    run_dir.mkdir(exist_ok=True)
    text = json.dumps({"name": lab, "network": "10.64.0.0/24", **DEAD, "namespaces": namespaces})
    (run_dir / f"{lab}.json").write_text(text)
