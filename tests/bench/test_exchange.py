from __future__ import annotations

import csv
import json

import pytest

from thinwire.bench.exchange import count_words, draw_all_phases
from thinwire.bench.exchange_cases import CASES, ExchangePlan, find_cases
from thinwire.bench.exchange_group import measure_group
from thinwire.bench.exchange_phases import pictured_methods, record_step, words_by_phase
from thinwire.bench.exchange_report import draw_words, time_table, words_table, write_rows
from thinwire.bench.ranks import run_ranks
from thinwire.cli import main
from thinwire.errors import UsageError
from thinwire.tools.traffic import write_lines


def test_words_stay_inside_the_formulas(tmp_path):
    rows, _ = count_words(ExchangePlan(virtual=(2, 5), count=(4096,), density=0.05, iters=2))
    assert {row["method"] for row in rows} == set(CASES)
    for row in rows:
        if row["method"] != "oktopk-published":
            assert row["inside"], row
    assert words_table(rows).row_count == len(rows)
    written = write_rows(rows, tmp_path, plot=True)
    assert [path.name for path in written] == ["rows.csv", "rows.json", "words.png"]
    assert len(list(csv.DictReader((tmp_path / "rows.csv").open()))) == len(rows)
    assert json.loads((tmp_path / "rows.json").read_text())["origin"]["versions"]["torch"]
    assert draw_words(rows, tmp_path / "again.png").stat().st_size > 0


def test_timing_on_a_group_gives_the_columns_of_nccl_tests(tmp_path):
    ledger = tmp_path / "traffic.csv"
    measured = ExchangePlan(methods="dense,exclusive", count=(2048,), density=0.05, iters=2)
    rows = run_ranks(measure_group, 2, measured, ledger)
    assert [row["method"] for row in rows] == ["dense", "exclusive"]
    for row in rows:
        assert row["wrong"] == 0
        assert row["size"] == 4 * row["count"]
        assert row["time_us"] >= row["exchange_us"] > 0
    assert rows[0]["error"] < 1e-6
    assert rows[1]["ratio"] > 5
    assert time_table(rows).row_count == 2
    lines = read_ledger(ledger)
    assert {(line["run"], line["rank"]) for line in lines} == {
        (f"{method} count=2048 ranks=2", rank) for method in ("dense", "exclusive") for rank in "01"
    }
    # The warm-up is not in it.
    assert {line["messages"] for line in lines if line["phase"] == "dense"} == {"2"}
    for line in lines:
        parts = [int(line[f"{part}_bytes"]) for part in ("payload", "padding", "control")]
        assert sum(parts) == int(line["sent_bytes"])
        assert float(line["seconds"]) > 0


def test_bad_input_gets_one_sentence(capsys):
    assert main(["bench", "exchange", "--virtual", "many"]) == 2
    assert "virtual is 'many'; it must be whole numbers with commas" in capsys.readouterr().err
    with pytest.raises(UsageError, match="methods is 'fast'"):
        find_cases("fast")


def read_ledger(path):
    return list(csv.DictReader(path.open()))


def test_the_ledger_of_virtual_ranks_is_what_the_rows_say(tmp_path):
    measured = ExchangePlan(
        methods="dense,oktopk", virtual=(3,), count=(4096,), density=0.05, iters=2
    )
    rows, lines = count_words(measured)
    write_lines(tmp_path / "traffic.csv", lines)
    for row in rows:
        run = f"{row['method']} count=4096 ranks=3"
        sent = [
            int(line["sent_bytes"])
            for line in read_ledger(tmp_path / "traffic.csv")
            if line["run"] == run
        ]
        assert sum(sent) == round(row["wire_bytes"] * 3 * 2)


def test_the_command_writes_the_ledger(tmp_path, capsys):
    path = tmp_path / "traffic.csv"
    command = "bench exchange --methods exclusive --virtual 2 --count 2048 --iters 1 --ledger"
    assert main([*command.split(), str(path)]) == 0
    assert {line["rank"] for line in read_ledger(path)} == {"0", "1"}
    assert main([*command.split(), str(tmp_path / "nowhere" / "traffic.csv")]) == 2
    assert "ledger is" in capsys.readouterr().err


def test_a_picture_of_every_phase(tmp_path):
    measured = ExchangePlan(count=(2048,), density=0.05)
    path = draw_all_phases(4, measured, tmp_path)
    assert path.name == "phases.png"
    assert path.stat().st_size > 0
    with pytest.raises(UsageError, match="--out"):
        draw_all_phases(4, measured, None)
    with pytest.raises(UsageError, match="phases is 1"):
        draw_all_phases(1, measured, tmp_path)


def test_words_by_phase_are_the_ledgers():
    method, per_host = pictured_methods(4, 0.05)["hierarchical, 2 hosts of 2, exclusive between"]
    ledgers = record_step(method, 4, 2000, per_host)
    phases = words_by_phase(ledgers, 100)
    total = sum(map(sum, phases.values())) * 100 * 4
    assert total == pytest.approx(sum(ledger.sent_bytes() for ledger in ledgers))
    assert next(iter(phases)) == "inside/flags, all-reduce"
