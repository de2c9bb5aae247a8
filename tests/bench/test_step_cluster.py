"""The step benchmark under a launcher: it measures on the processes that are there, and survives a cell that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.step_rows import fake_row
from tests.launch import free_port
from thinwire.bench.rows import add_noop
from thinwire.bench.step_cell import ANY_RATE, CLUSTER, LOCAL, plan_cell
from thinwire.bench.step_command import cluster_rates, count_workers
from thinwire.cli import main
from thinwire.errors import UsageError

MODELS = "tests.bench.step_models:broken,tests.bench.step_models:tiny"


def test_a_launched_process_measures_and_survives_a_cell_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One alone; two of them under torchrun are tried in `make slow`."""
    told = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    options = ["--model", MODELS, "--methods", "adtopk", "--no-anchors", "--steps", "3"]
    options += ["--seconds", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["bench", "step", *options]) == 0
    failed, measured = json.loads((tmp_path / "rows.json").read_text())
    assert failed["status"] == "failed" and "this model cannot be built" in failed["note"]
    assert measured["status"] == "ok" and measured["workers"] == 1
    assert {measured["place"], measured["rate"]} == {"cluster"}
    assert capsys.readouterr().out.count("rows: ") == 1


@pytest.mark.slow
def test_workers_of_torchrun_measure_together(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
    command = ["-m", "thinwire", "bench", "step", "--model", MODELS, "--methods", "adtopk"]
    command += ["--no-anchors", "--steps", "3", "--seconds", "1", "--device", "cpu"]
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
    assert (tmp_path / "where_a_step_goes.png").exists()
    assert done.stdout.count("rows: ") == 1, "only rank 0 speaks"


def test_the_command_needs_no_plots() -> None:
    blocked = "import sys; sys.modules |= {'matplotlib': None}\n"
    code = blocked + "import thinwire.bench.step_command"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_another_machines_noop_is_not_the_clusters() -> None:
    own, cluster = (plan_cell("small", "noop", rate=rate) for rate in (LOCAL, CLUSTER))
    assert (own.rate, cluster.rate) == (ANY_RATE, CLUSTER)
    rows = [
        fake_row(plan_cell("small", method, rate=rate), ms)
        for method, rate, ms in (
            ("noop", LOCAL, 1.0),
            ("noop", CLUSTER, 2.0),
            ("ddp", CLUSTER, 6.0),
        )
    ]
    assert [row["ratio_noop"] for row in add_noop(rows)] == [1.0, 1.0, 3.0]


def test_a_launcher_decides_about_workers_and_network(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_workers(None) == [4]
    assert count_workers((2, 8)) == [2, 8]
    with pytest.raises(UsageError, match="workers is empty; it must be whole numbers"):
        count_workers(())
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(UsageError, match="MASTER_ADDR is not set, but RANK and WORLD_SIZE are"):
        count_workers(None)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert count_workers(None) == count_workers((6,)) == [6]
    with pytest.raises(UsageError, match="workers is 2,8, but 6 were started already"):
        count_workers((2, 8))
    with pytest.raises(UsageError, match="rates is '1gbit', but a launcher's machines have"):
        cluster_rates(("1gbit",))
