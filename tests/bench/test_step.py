from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.lab.conftest import why_no_lab
from thinwire.bench.models import build_workload
from thinwire.bench.rows import COLUMNS, RowBook
from thinwire.bench.step import run_cells
from thinwire.bench.step_cell import plan_cell
from thinwire.bench.step_places import LabPlace, LocalPlace
from thinwire.bench.trace import StationTimer
from thinwire.observe.stations import DECODE, ENCODE, EXCHANGE, station, watch

SHORT = {"workers": 2, "steps": 3, "seconds": 2.0}
MAY_BE_EMPTY = {"length", "bucket_mb", "rank", "note", "gpu", "commit"}


def test_a_row_is_complete_without_a_lab(tmp_path: Path) -> None:
    cells = [plan_cell("small", "noop", **SHORT), plan_cell("small", "adtopk", **SHORT)]
    book = RowBook(tmp_path / "out")
    run_cells(cells, book, LocalPlace(), timeout_s=150, trace=tmp_path / "trace")
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


def test_measuring_needs_neither_typer_nor_rich() -> None:
    blocked = "import sys; sys.modules |= {'typer': None, 'rich': None, 'matplotlib': None}\n"
    modules = "import thinwire.bench.step, thinwire.bench.step_worker, thinwire.bench.step_places"
    subprocess.run([sys.executable, "-c", blocked + modules], check=True, timeout=60)


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
