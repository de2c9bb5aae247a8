"""`thinwire bench wire`: rows that add up, and a CSV that says where they come from."""

from __future__ import annotations

import csv
import io
import math

import pytest
import torch

from thinwire.bench.payloads import Fuzzed, make_picks, make_table
from thinwire.bench.wire import (
    FORMATS,
    WireRow,
    bench_wire,
    entropy_bits,
    measure,
    report_fuzz,
    to_csv,
    wire_table,
)
from thinwire.errors import UsageError


def make_rows() -> list[WireRow]:
    table = make_table([(4, 1024, 10)])
    picks = make_picks(table, torch.randn(table.numel))
    return [
        WireRow(
            shape="4 x 1024",
            density=0.01,
            entries=table.entries,
            format=" + ".join(names),
            **measure(table, picks, names, repeats=1),
        )
        for names in FORMATS
    ]


def test_entropy_counts_the_ways_to_choose() -> None:
    assert math.isclose(entropy_bits(make_table([(3, 20, 4)])), math.log2(math.comb(20, 4)) / 4)


def test_rows_add_up_and_are_written_with_their_origin() -> None:
    rows = make_rows()
    for row in rows:
        assert row.total_bits_sent == row.value_bits + row.index_bits_sent
        assert row.index_bits_mean <= row.index_bits_sent
        assert row.payload_bits >= row.total_bits_sent
    read = list(csv.DictReader(io.StringIO(to_csv(rows, "a machine"))))
    assert [line["format"] for line in read] == [" + ".join(names) for names in FORMATS]
    assert all(line["hardware"] == "a machine" and line["torch"] and line["date"] for line in read)
    assert wire_table(rows, "title").row_count == len(rows) + 5


def test_wrong_options_get_one_sentence() -> None:
    with pytest.raises(UsageError, match="--device is 'tpu'; it must be cpu or cuda"):
        bench_wire(device="tpu")
    with pytest.raises(UsageError, match="--repeats is 0; it must be at least 1"):
        bench_wire(repeats=0)


def test_fuzz_report() -> None:
    assert report_fuzz(Fuzzed(3, 1, 2, 4.0)).startswith("3 spoiled payloads in 4 s: 1 refused, 2 ")
