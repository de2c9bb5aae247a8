from __future__ import annotations

import csv
import json

import pytest

from thinwire.bench.exchange import (
    count_words,
    draw_words,
    parse_numbers,
    time_table,
    words_table,
    write_rows,
)
from thinwire.bench.exchange_cases import CASES, find_cases
from thinwire.bench.exchange_group import measure_group
from thinwire.errors import UsageError


def test_words_stay_inside_the_formulas(tmp_path):
    rows = count_words("all", [2, 5], [4096], 0.05, "fp32", 2)
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


def test_timing_on_a_group_gives_the_columns_of_nccl_tests():
    rows = measure_group("dense,exclusive", 2, [2048], 0.05, "fp32", 2)
    assert [row["method"] for row in rows] == ["dense", "exclusive"]
    for row in rows:
        assert row["wrong"] == 0
        assert row["size"] == 4 * row["count"]
        assert row["time_us"] >= row["exchange_us"] > 0
    assert rows[0]["error"] < 1e-6
    assert rows[1]["ratio"] > 5
    assert time_table(rows).row_count == 2


def test_bad_input_gets_one_sentence():
    with pytest.raises(UsageError, match="virtual is 'many'"):
        parse_numbers("virtual", "many")
    with pytest.raises(UsageError, match="methods is 'fast'"):
        find_cases("fast")
