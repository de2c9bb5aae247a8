"""Local steps and profiles in the step benchmark: one run of two processes for the whole file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.pages import ROOT
from thinwire.bench.host_profile import HostClock, name_thread, profile_file, read_profile
from thinwire.bench.rows import Row, RowBook
from thinwire.bench.step import run_cells
from thinwire.bench.step_cell import StepCell, plan_cell, plan_grid
from thinwire.bench.step_places import LocalPlace
from thinwire.bench.step_report import show_profile
from thinwire.bench.step_worker import mean_rounds
from thinwire.bench.transformer_shapes import llama_like, t5_like
from thinwire.errors import UsageError

SHORT = {"workers": 2, "steps": 3, "seconds": 2.0}
MODEL = "tests.bench.step_models:tiny"
CELLS = [
    plan_cell(MODEL, "dense", **SHORT),
    plan_cell(MODEL, "diloco", every=4, **SHORT),
    plan_cell(MODEL, "sparseloco", every=2, **SHORT),
    plan_cell("tests.bench.step_models:deep", "streaming-diloco", every=8, **SHORT),
]
BYTES = 4 * (64 * 32 + 32)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row]]:
    """The folder of profiles and traces, and the rows of all cells."""
    folder = tmp_path_factory.mktemp("local")
    book = RowBook(folder / "rows")
    run_cells(CELLS, book, LocalPlace(), timeout_s=150, profiles=folder, traces=folder / "traces")
    assert [row["status"] for row in book.rows] == ["ok"] * 4, [row["note"] for row in book.rows]
    return folder, book.rows


def test_a_row_of_local_steps_is_of_whole_rounds(measured: tuple[Path, list[Row]]) -> None:
    dense, diloco, sparse, _ = measured[1]
    assert (diloco["every"], diloco["steps"], sparse["steps"]) == (4, 8, 4)
    # Two workers send a whole gradient each, once in a round.
    assert dense["ledger_bytes"] == pytest.approx(BYTES, rel=0.05)
    assert diloco["ledger_bytes"] == pytest.approx(BYTES / 4, rel=0.05)
    assert 0 < sparse["ledger_bytes"] < BYTES / 2
    assert diloco["replicas_identical"] and sparse["replicas_identical"]
    assert "every=4" in diloco["settings"] and sparse["density"] == 1 / 64
    assert mean_rounds([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]


def test_the_profile_says_where_the_host_was(
    measured: tuple[Path, list[Row]], capsys: pytest.CaptureFixture[str]
) -> None:
    profile = read_profile(profile_file(measured[0], CELLS[0]))
    phases = {phase.name: phase for phase in profile.phases}
    assert phases.keys() == {
        *("forward", "backward", "hook", "encode", "exchange", "decode", "optimizer")
    }
    assert profile.buckets == 1.0 and phases["forward"].thread == "main"
    assert all(phase.wall_us >= 0 and phase.busy_us >= -1 for phase in profile.phases)
    show_profile(profile, Console(width=80))
    shown = capsys.readouterr().out
    assert "us a step on worker 0's host, 1 buckets" in shown and "hook, beside" in shown
    rounds = read_profile(profile_file(measured[0], CELLS[1]))
    assert rounds.buckets == 0 and "exchange" in {phase.name for phase in rounds.phases}


def test_a_trace_of_local_steps_tells_what_is_hidden(
    measured: tuple[Path, list[Row]], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.json"
    command = [sys.executable, "benchmarks/local_overlap.py", str(measured[0] / "traces")]
    done = subprocess.run(
        [*command, "--out", str(rows)], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found = {row["trace"]: row for row in json.loads(rows.read_text())}
    assert len(found) == 8
    for name, row in found.items():
        assert row["exchanges"] and 0 <= row["hidden_ms"] <= row["exchange_ms"], name
    streaming = next(row for name, row in found.items() if "streaming" in name)
    # A whole round of every fragment, where others are traced for three steps or a round.
    assert streaming["steps"] == 8 and "under forward and backward" in done.stdout


def test_a_phase_does_not_count_what_is_inside_another() -> None:
    clock = HostClock()
    with clock("backward"), clock("thinwire::driver"), clock("thinwire::encode"):
        sum(range(200_000))
    backward, driver, encode = clock.phases(steps=1)
    assert (backward.name, driver.name, encode.name) == ("backward", "driver", "encode")
    # In processor time: the machine may be busy.
    assert max(backward.busy_us, driver.busy_us) < encode.busy_us and encode.calls == 1
    assert [name_thread(name) for name in ("MainThread", "Dummy-3", "thinwire-exchange")] == [
        *("main", "autograd", "exchange")
    ]


def test_the_grid_has_a_cell_for_every_length_of_a_round() -> None:
    cells = plan_grid(
        models=["small"], methods=["ddp", "diloco"], rates=[], workers=[2], every=[8, 32]
    )
    assert [(cell.method, cell.every) for cell in cells] == [
        *(("ddp", None), ("diloco", 8), ("diloco", 32))
    ]
    with pytest.raises(UsageError, match="with streaming-diloco it must be at least 8"):
        plan_cell("small", "streaming-diloco", every=4)
    with pytest.raises(UsageError, match="which is measured with parallel=ddp only"):
        StepCell(model="small", method="diloco", every=8, batch=2, workers=4, parallel="hsdp")


@pytest.mark.slow
def test_transformers_shapes_train() -> None:
    pytest.importorskip("transformers")
    small = {"d_model": 8, "d_ff": 16, "d_kv": 4, "num_layers": 1, "num_heads": 2}
    llama = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    llama |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    for make in (t5_like("t5", small), llama_like("llama", llama)):
        work = make(torch.device("cpu"), 2, 5)
        work.loss(work.model, work.draw()).backward()
        assert all(p.grad is not None for p in work.model.parameters())
