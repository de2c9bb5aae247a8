"""A job of `thinwire train` whose workers are joined by emulated links."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes import own_tasks
from tests.recipes.test_launch import listening_addresses, wait_until
from thinwire.lab.processes import NAMESPACE_FOLDER
from thinwire.tools.results import read_rows

ROOT = Path(__file__).parents[2]


def namespace_of(pid: int) -> int:
    return Path(f"/proc/{pid}/ns/net").stat().st_ino


@pytest.mark.root
def test_workers_on_links_listen_inside_their_namespaces_only(
    tmp_path: Path, run_dir: Path
) -> None:
    out = tmp_path / "out"
    task = f"{own_tasks.__name__}:WAITING"
    command = f"train {task} --workers 2 --link 100mbit --data-dir {tmp_path} --out {out}"
    launcher = subprocess.Popen(
        [sys.executable, "-m", "thinwire", *command.split()], cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        wait_until(lambda: len(list(tmp_path.glob("at-work*"))) == 2)
        workers = [int(path.read_text()) for path in tmp_path.glob("at-work*")]
        (record,) = run_dir.glob("tw*.json")
        own = {path.stat().st_ino for path in NAMESPACE_FOLDER.glob(f"{record.stem}-host*")}
        assert {namespace_of(pid) for pid in workers} == own and len(own) == 2
        assert namespace_of(os.getpid()) not in own
        assert listening_addresses(launcher.pid) == set()
        for pid in workers:
            # 10.64.0.0/10 as the kernel writes it, alone or inside an IPv6 address.
            assert listening_addresses(pid)
            assert all(address[-2:] == "0A" for address in listening_addresses(pid))
        (tmp_path / "go-on").touch()
        shown, _ = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 0
    assert b"2 workers on emulated 100mbit links" in shown
    assert read_rows(out)[0]["about"]["link"] == "100mbit"
    assert not list(NAMESPACE_FOLDER.glob(f"{record.stem}*"))
