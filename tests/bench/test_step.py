from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.lab.conftest import why_no_lab
from tests.sharded import weights
from thinwire.bench.models import build_workload
from thinwire.bench.rows import COLUMNS, RowBook
from thinwire.bench.step import run_cells
from thinwire.bench.step_cell import plan_cell
from thinwire.bench.step_places import LabPlace, LocalPlace, trace_prefix
from thinwire.bench.step_worker import CellTrainer, RankWorkload
from thinwire.bench.trace import StationTimer
from thinwire.errors import UsageError
from thinwire.observe.stations import DECODE, ENCODE, EXCHANGE, station, watch

SHORT = {"workers": 2, "steps": 3, "seconds": 2.0}
MAY_BE_EMPTY = {"length", "bucket_mb", "rank", "every", "latency", "note", "gpu", "commit"}


def test_a_row_is_complete_without_a_lab(tmp_path: Path) -> None:
    cells = [plan_cell("small", "noop", **SHORT), plan_cell("small", "adtopk", **SHORT)]
    book = RowBook(tmp_path / "out")
    run_cells(cells, book, LocalPlace(), timeout_s=150, traces=tmp_path / "trace")
    noop, row = book.rows
    assert (noop["status"], row["status"]) == ("ok", "ok"), [noop["note"], row["note"]]
    empty = {name for name in COLUMNS if row[name] in (None, "")}
    assert empty <= MAY_BE_EMPTY | {"link_bytes"}
    assert row["ms_p20"] <= row["ms"] <= row["ms_p80"]
    assert row["ratio_noop"] == row["ms"] / noop["ms"]
    assert row["replicas_identical"] and not noop["replicas_identical"]
    assert row["steps"] == 3 and row["parameters"] == 1_055_242
    assert 0 < row["ledger_bytes"] < 0.05 * 4 * row["parameters"]

    traces = sorted((tmp_path / "trace").glob("small-adtopk-*.json"))
    assert [path.name[-10:] for path in traces] == ["rank0.json", "rank1.json"]
    events = json.loads(traces[0].read_text())["traceEvents"]
    stations = Counter(event.get("name") for event in events)
    assert all(stations[name] >= 3 for name in (ENCODE, EXCHANGE, DECODE))


def test_ranks_share_weights_and_differ_in_data() -> None:
    built = [
        build_workload("tests.bench.step_models:tiny", torch.device("cpu"), 8, None, rank)
        for rank in (0, 1)
    ]
    weights = [model.weight for model, _ in built]
    assert torch.equal(weights[0], weights[1])
    assert built[0][1](built[0][0]) != built[1][1](built[1][0])


def test_a_cell_that_fails_becomes_a_row_with_a_reason(tmp_path: Path) -> None:
    model = "tests.bench.step_models:broken"
    book = RowBook(tmp_path)
    run_cells([plan_cell(model, "ddp", workers=1)], book, LocalPlace(), timeout_s=150)
    assert book.rows[0]["status"] == "failed"
    assert "this model cannot be built" in book.rows[0]["note"]
    assert book.rows[0]["date"] and book.rows[0]["ms"] is None


# tests/lab/test_hierarchical.py compares ledger and interface in `make test`.
@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize(("method", "density"), [("dense", None), ("adtopk", 0.3)])
def test_the_ledger_agrees_with_the_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, density: float | None
) -> None:
    if why_no_lab():
        pytest.skip(why_no_lab())
    monkeypatch.setenv("THINWIRE_RUN_DIR", str(tmp_path / "run"))
    steps = 4 if method == "dense" else 9
    cell = plan_cell(
        "small", method, rate="200mbit", density=density, workers=2, steps=steps, seconds=6.0
    )
    book = RowBook(tmp_path / "out")
    with LabPlace() as place:
        run_cells([cell], book, place, timeout_s=150)
    (row,) = book.rows
    assert row["status"] == "ok", row["note"]
    assert row["ledger_bytes"] * row["steps"] > 10e6
    assert row["link_bytes"] == pytest.approx(row["ledger_bytes"], rel=0.03)
    # The link is the bottleneck, and it holds its rate: no step can be faster than its bytes.
    assert row["ms"] > 0.9 * 1000 * row["link_bytes"] * 8 / 200e6
    assert row["place"] == "lab" and row["rate"] == "200mbit"


def test_a_lab_that_cannot_be_had_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyroute2", None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    cell = plan_cell("small", "dense", rate="1gbit")
    with pytest.raises(UsageError, match="needs the package pyroute2"), LabPlace() as place:
        place.run(cell, ["true"], 1.0)


def test_no_two_cells_share_a_trace(tmp_path: Path) -> None:
    others: dict[str, Any] = {"amp": "bf16", "device": "cuda", "parallel": "hsdp", "length": 7}
    settings: list[dict[str, Any]] = [{}, *({name: value} for name, value in others.items())]
    cells = [plan_cell("small", "topk", **one) for one in settings]
    assert len({trace_prefix(tmp_path, cell) for cell in cells}) == len(cells)


def test_measuring_needs_neither_typer_nor_rich() -> None:
    blocked = "import sys; sys.modules |= {'typer': None, 'rich': None, 'matplotlib': None}\n"
    modules = "import thinwire.bench.step, thinwire.bench.step_worker, thinwire.bench.step_places\n"
    modules += "import thinwire.bench.compress, thinwire.bench.compress_plots"
    subprocess.run([sys.executable, "-c", blocked + modules], check=True, timeout=120)


def test_stations_are_seen_by_watchers_and_by_the_profiler() -> None:
    timer = StationTimer(torch.device("cpu"))
    with station(ENCODE):
        pass
    with watch(timer), station(ENCODE):
        pass
    assert timer.milliseconds()[ENCODE] > 0.0 == timer.milliseconds()[DECODE]
    with torch.profiler.profile() as profile, station(DECODE):
        torch.zeros(1)
    assert DECODE in {event.key for event in profile.key_averages()}


HSDP = {"workers": 4, "steps": 2, "seconds": 2.0, "parallel": "hsdp"}


def test_anchors_and_workers_of_sharded_models() -> None:
    assert plan_cell("small", "hsdp", **HSDP).workers == 4
    with pytest.raises(UsageError, match="which is no anchor of parallel=hsdp"):
        plan_cell("small", "ddp", **HSDP)
    with pytest.raises(UsageError, match="workers is 3; with parallel=hsdp it must be a multiple"):
        plan_cell("small", "adtopk", workers=3, parallel="hsdp")


def cells_job(rank: int, world: int) -> bool:
    """The weights after one step, in the first cell and in one behind a step without traffic between hosts."""
    device, cell = torch.device("cpu"), plan_cell("small", "hsdp", **HSDP)
    workload, ends = RankWorkload(cell, device), []
    for _ in range(2):
        trainer = CellTrainer(cell, workload, device)
        trainer.step()
        ends.append(weights(trainer.model))
        trainer.step_alone()
        trainer.close()
    return torch.equal(*ends)


def test_a_sharded_cell_leaves_nothing_to_the_next(sharded) -> None:
    if not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("reset_iter_state is new in torch 2.13")
    assert all(sharded.run(cells_job))


@pytest.mark.slow
def test_a_sharded_model_is_measured_against_plain_training(tmp_path: Path) -> None:
    cells = [plan_cell("small", name, **HSDP) for name in ("hsdp", "adtopk")]
    book = RowBook(tmp_path / "out")
    run_cells(cells, book, LocalPlace(), timeout_s=150)
    plain, row = book.rows
    assert (plain["status"], row["status"]) == ("ok", "ok"), [plain["note"], row["note"]]
    assert row["replicas_identical"] and plain["replicas_identical"]
    assert row["parallel"] == "hsdp" and row["parameters"] == 1_055_242
    # Of half the parameters: each worker exchanges its shard.
    assert 0 < row["ledger_bytes"] < 0.03 * 4 * row["parameters"]
