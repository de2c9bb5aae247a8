from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.bench.step_rows import ORIGIN, fake_row
from thinwire.bench.anchors import ANCHORS, GLOO_ANCHORS, build_step_method
from thinwire.bench.plots import draw_plots, draw_rates, draw_speedup
from thinwire.bench.rows import COLUMNS, RowBook, make_failed_row, read_rows
from thinwire.bench.step import explain, run_cells
from thinwire.bench.step_cell import StepCell, plan_cell, plan_grid
from thinwire.bench.step_command import bench_step, choose_place, possible_rates
from thinwire.bench.step_places import STORE_VARIABLE, Attempt, LocalPlace, Place
from thinwire.bench.step_suite import (
    ACPSGD_METHODS,
    BUCKETS_MB,
    RANKS,
    plan_acpsgd,
)
from thinwire.errors import UsageError
from thinwire.methods.powersgd import PowerSGD
from thinwire.tools.figures import make_figure
from thinwire.tools.palette import Styles
from thinwire.tools.step_parts import split_step


class NoPlace(Place):
    """Fails if a cell is measured."""

    name = "local"

    def run(self, cell: StepCell, command: object, timeout_s: float) -> Attempt:
        raise AssertionError(f"{cell.describe()} was measured again")


def grid(**changes: object) -> list[StepCell]:
    settings: dict = {
        "models": ["small", "lstm"],
        "methods": ["noop", "ddp", "adtopk"],
        "rates": ["10gbit", "1gbit"],
        "workers": [2, 4],
    }
    return plan_grid(**{**settings, **changes})


def test_the_grid_has_each_cell_once_and_what_sends_nothing_for_no_rate() -> None:
    cells = grid()
    assert len(cells) == len({cell.key for cell in cells}) == 2 * 2 * (1 + 2 * 2)
    assert {cell.rate for cell in cells if cell.method == "noop"} == {"any"}
    assert cells[0].method == "noop"
    assert {cell.density for cell in cells if cell.method == "adtopk"} == {0.01}
    assert {cell.density for cell in cells if cell.method == "ddp"} == {None}
    assert {cell.length for cell in cells if cell.model == "lstm"} == {35}


def test_a_row_tells_more_than_its_setting_only_where_the_method_takes_it() -> None:
    assert plan_cell("small", "ddp-powersgd").rank == 4
    assert plan_cell("small", "ddp-powersgd", rank=8, density=0.5).density is None
    assert plan_cell("small", "acpsgd").rank == 4
    assert build_step_method("powersgd", 0.5, 8) == PowerSGD(rank=8)
    assert plan_cell("small", "adtopk", rank=8, density=0.5).key != plan_cell("small", "adtopk").key


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"models": ["smal"]}, "did you mean small"),
        ({"models": ["json:nothing"]}, "no function nothing"),
        ({"models": ["no_such_module:f"]}, "no_such_module"),
        ({"methods": ["topq"]}, "method is 'topq'"),
        ({"rates": ["fast"]}, "rate is"),
        ({"workers": [0]}, "workers is 0"),
        ({"amp": "fp8"}, "amp is 'fp8'"),
        ({"bucket_mb": -1.0}, "bucket_mb is -1.0"),
    ],
)
def test_bad_settings_get_a_sentence(changes: dict, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        grid(**changes)


def test_the_suite_is_the_papers_matrix_and_can_run_on_another_model() -> None:
    cells = plan_acpsgd(workers=8)
    assert {cell.model for cell in cells} == {"resnet50", "resnet152", "bert-base", "bert-large"}
    assert {cell.bucket_mb for cell in cells} == {None, *map(float, BUCKETS_MB)}
    assert {cell.method for cell in cells} == set(ACPSGD_METHODS)
    for method in ("ddp-powersgd", "powersgd", "acpsgd"):
        assert {cell.rank for cell in cells if cell.method == method} == set(RANKS)
    assert {cell.workers for cell in cells} == {2, 4, 8}
    assert {cell.rate for cell in cells} == {"any", "10gbit", "1gbit", "unshaped"}
    small = plan_acpsgd(workers=2, rates=["local"], model="small")
    assert {cell.model for cell in small} == {"small"}
    assert len(small) == len({cell.key for cell in small})


def test_rows_are_saved_at_once_and_never_measured_twice(tmp_path: Path) -> None:
    cells = grid()
    book = RowBook(tmp_path / "out")
    for number, cell in enumerate(cells):
        row = book.add(fake_row(cell, 20.0 + number))
        assert row["status"] == "ok" and set(row) == set(COLUMNS)
        assert len(read_rows(tmp_path / "out")) == number + 1
    said: list[str] = []
    again = RowBook(tmp_path / "out")
    assert run_cells(cells, again, NoPlace(), say=said.append) == []
    assert len(said) == len(cells) and all(line.endswith("already measured") for line in said)
    with (tmp_path / "out" / "rows.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["method"] for line in lines] == [row["method"] for row in again.rows]
    last = again.rows[-1]
    assert last["ratio_no_sync"] == last["ms"] / 10.0
    assert last["ratio_noop"] == last["ms"] / last["noop_ms"]
    assert last["noop_ms"] == next(
        row["ms"]
        for row in again.rows
        if (row["method"], row["model"], row["workers"]) == ("noop", "lstm", 4)
    )


def test_failed_rows_are_kept_and_tried_again(tmp_path: Path) -> None:
    cell = plan_cell("small", "ddp-powersgd")
    book = RowBook(tmp_path)
    book.add(make_failed_row(cell, "local", ORIGIN, 1.0, "it fell over"))
    assert not book.has(cell) and read_rows(tmp_path)[0]["note"] == "it fell over"
    book.add(fake_row(cell, 12.0))
    assert len(book.rows) == 1 and book.has(cell)


def test_no_cell_is_begun_when_time_is_up(tmp_path: Path) -> None:
    said: list[str] = []
    cells = [plan_cell("small", "ddp")]
    assert run_cells(cells, RowBook(tmp_path), NoPlace(), deadline=0.0, say=said.append) == []
    assert "left for the next run" in said[0]


def test_failures_are_explained() -> None:
    crash = Attempt(134, "rank 0 was ended by signal 6.", "terminate called\n")
    assert "more than one bucket" in explain(plan_cell("small", "ddp-powersgd"), crash)
    error = Attempt(1, "rank 0 failed.", 'Traceback\n  File "x", line 1\nValueError: no\nbye\n')
    assert explain(plan_cell("small", "ddp-powersgd"), error) == "rank 0 failed. ValueError: no"


def test_unreadable_rows_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run `thinwire bench step` first"):
        read_rows(tmp_path)
    (tmp_path / "rows.json").write_text("[")
    with pytest.raises(UsageError, match="not a JSON list"):
        read_rows(tmp_path)


def test_the_parts_of_a_bar_add_up_to_the_step() -> None:
    for ms in (8.0, 11.0, 12.5, 40.0):
        row = fake_row(plan_cell("small", "adtopk"), ms)
        parts = split_step(row, row["no_sync_ms"])
        assert sum(parts.values()) == pytest.approx(row["ms"])
        assert min(parts.values()) >= 0.0


def test_plots_come_from_rows_alone(tmp_path: Path) -> None:
    rows = [fake_row(cell, 15.0 + n) for n, cell in enumerate(grid(models=["small"]))]
    drawn = draw_plots(rows, tmp_path / "plots")
    assert [path.name for path in drawn] == [
        "step_time.png",
        "where_a_step_goes.png",
        "speedup.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert draw_plots([], tmp_path / "none") == []


def test_the_command_shows_what_is_measured_already(tmp_path: Path) -> None:
    book = RowBook(tmp_path)
    methods = [*GLOO_ANCHORS, "dense", "topk"]
    shared = {"rates": [], "workers": [2], "device": "cpu"}
    for n, cell in enumerate(plan_grid(models=["small"], methods=methods, **shared)):
        book.add(fake_row(cell, 30.0 + n))
    app = typer.Typer()
    app.command()(bench_step)
    arguments = ["--methods", "dense,topk", "--workers", "2", "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert result.output.count("already measured") == len(methods)
    assert "ddp-bf16" in result.output and "step_time.png" in result.output
    assert json.loads((tmp_path / "rows.json").read_text())[0]["model"] == "small"


def test_a_dry_run_shows_what_is_not_measured_yet(tmp_path: Path) -> None:
    book = RowBook(tmp_path)
    book.add(fake_row(plan_cell("small", "dense", workers=2, device="cpu"), 30.0))
    app = typer.Typer()
    app.command()(bench_step)
    arguments = ["--methods", "dense,topk", "--workers", "2", "--device", "cpu", "--no-anchors"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path), "--dry-run"])
    assert result.output.splitlines() == [
        f"1 to measure, on cpu, beside what is in {tmp_path} already:",
        "  small, topk, local processes (2 workers, batch 32, density 0.01)",
    ]


def test_without_root_rates_become_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert possible_rates(None, None) == []
    assert capsys.readouterr().err == ""
    assert possible_rates(("10gbit",), None) == []
    assert "need root" in capsys.readouterr().err
    assert isinstance(choose_place([], "cpu"), LocalPlace)


def plan_by_script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[StepCell]:
    path = Path(__file__).parents[2] / "benchmarks" / "h200_step.py"
    spec = importlib.util.spec_from_file_location("h200_step", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(script)
    monkeypatch.setattr(sys, "argv", ["h200_step.py", *arguments])
    return script.plan(script.parse())


def test_the_script_begins_with_what_matters_most(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = plan_by_script(monkeypatch)
    first = [(cell.method, cell.model, cell.rate) for cell in cells[:6]]
    models = ["bert-large", "resnet152", "vgg16"]
    assert first == [
        *(("noop", model, "any") for model in models),
        *(("adtopk", model, "10gbit") for model in models),
    ]
    assert {cell.rate for cell in cells} == {"any", "10gbit", "1gbit"}
    assert {cell.amp for cell in cells} == {"bf16"} and {cell.workers for cell in cells} == {4}
    assert set(ANCHORS) | {"dense", "topk", "adtopk"} <= {cell.method for cell in cells}
    wanted = ["--cells", "topk:small:10gbit,dgc:small:10gbit", "--workers", "1,4"]
    found = [(cell.method, cell.workers) for cell in plan_by_script(monkeypatch, *wanted)]
    assert found == [("topk", 1), ("dgc", 1), ("topk", 4), ("dgc", 4)]


def test_the_script_compares_sharded_models_with_plain_sharded_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cells = plan_by_script(monkeypatch, "--parallel", "hsdp", "--models", "bert-large")
    first = [(cell.method, cell.rate) for cell in cells[:4]]
    assert first[:3] == [("no_sync", "any"), ("adtopk", "10gbit"), ("hsdp", "10gbit")]
    assert not {cell.method for cell in cells} & {*ANCHORS} - {"no_sync"}


def test_the_local_place_reports_who_failed() -> None:
    attempt = LocalPlace().run(
        plan_cell("small", "ddp"), ["sh", "-c", 'echo "Error: $RANK"; exit $RANK'], timeout_s=20
    )
    assert (attempt.exit_code, attempt.output) == (1, "Error: 1\n")
    late = LocalPlace().run(plan_cell("small", "ddp"), ["sleep", "30"], timeout_s=0.2)
    assert late.exit_code == 124


def test_local_workers_meet_in_a_folder_of_the_users_own_and_talk_over_the_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    place = f'"$(dirname ${STORE_VARIABLE})"'
    look = f"(stat -c %a {place}; echo $GLOO_SOCKET_IFNAME$MASTER_ADDR) > {tmp_path}/$RANK"
    attempt = LocalPlace().run(plan_cell("small", "ddp"), ["sh", "-c", look], timeout_s=20)
    assert attempt.exit_code == 0
    said = {path.read_text() for path in tmp_path.iterdir()}
    assert said in ({"700\nlo\n"}, {"700\nlo0\n"})


def test_every_point_of_a_plot_was_measured() -> None:
    rows = [fake_row(cell, 20.0 + n) for n, cell in enumerate(grid(models=["small"]))]
    sending = [row for row in rows if row["method"] != "noop"]
    figure = make_figure(4, 4)
    for draw, chosen, places in (
        (draw_rates, [row for row in rows if row["workers"] == 4], {1.0, 10.0}),
        (draw_speedup, [row for row in sending if row["rate"] == "1gbit"], {2, 4}),
    ):
        axes = figure.subplots()
        draw(axes, chosen, Styles())
        handles, names = axes.get_legend_handles_labels()
        for handle, name in zip(handles, names, strict=True):
            if name in ("ddp", "adtopk 0.01"):
                line = handle[0] if isinstance(handle, tuple) else handle
                assert {float(x) for x in line.get_xdata()} == places, name
        assert {"ddp", "adtopk 0.01"} <= set(names)
        assert axes.collections, "the spread is shown"
