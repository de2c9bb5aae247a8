"""The step benchmark under a launcher: it measures on the processes that are there, and survives a cell that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.bench.step_command import cluster_rates, count_workers
from thinwire.errors import UsageError

MODELS = "tests.bench.step_models:broken,tests.bench.step_models:tiny"


def test_workers_of_torchrun_measure_together(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
    command = ["-m", "thinwire", "bench", "step", "--model", MODELS, "--methods", "adtopk"]
    command += ["--no-anchors", "--steps", "3", "--seconds", "1", "--no-plots", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, *launcher, *command, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    failed, measured = json.loads((tmp_path / "rows.json").read_text())
    assert failed["status"] == "failed" and "this model cannot be built" in failed["note"]
    assert measured["status"] == "ok" and measured["replicas_identical"]
    assert {measured["place"], measured["rate"]} == {"cluster"} and measured["workers"] == 2
    assert done.stdout.count("rows: ") == 1, "only rank 0 speaks"


def test_a_launcher_decides_about_workers_and_network(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_workers(None) == [4]
    assert count_workers("2,8") == [2, 8]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert count_workers(None) == count_workers("6") == [6]
    with pytest.raises(UsageError, match="workers is 2,8, but 6 were started already"):
        count_workers("2,8")
    with pytest.raises(UsageError, match="rates is '1gbit', but a launcher's machines have"):
        cluster_rates("1gbit")
