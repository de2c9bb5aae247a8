from __future__ import annotations

import csv
import io

import pytest
import torch

from thinwire.bench.data import draw
from thinwire.bench.select import (
    SelectRow,
    bench_select,
    measure,
    select_table,
    to_csv,
)
from thinwire.bench.selections import SELECTIONS
from thinwire.errors import UsageError


def rows_of(names, density=0.01):
    for name in names:
        figures = measure(SELECTIONS[name](density), [draw("laplace", 20_000)], repeats=1)
        yield SelectRow(data="laplace", elements=20_000, density=density, selection=name, **figures)


def test_exact_top_k_is_the_measure_of_the_others():
    exact, estimated, random = rows_of(["exact top-k", "GaussianK", "RandomK"])
    assert (exact.realised, exact.energy) == (1.0, 1.0)
    assert 0.8 <= estimated.realised <= 1.25 and 0.8 < estimated.energy < 1.25
    assert random.energy < 0.5


def test_rows_become_a_table_and_a_file():
    rows = list(rows_of(["exact top-k", "DGC sampled"]))
    assert select_table(rows, "title").row_count == 2
    read = list(csv.DictReader(io.StringIO(to_csv(rows, "here"))))
    assert [row["selection"] for row in read] == ["exact top-k", "DGC sampled"]
    assert all(row["hardware"] == "here" and row["torch"] == torch.__version__ for row in read)


def test_wrong_options_are_named():
    with pytest.raises(UsageError, match="--device"):
        bench_select(device="tpu")
    with pytest.raises(UsageError, match="--repeats"):
        bench_select(repeats=0)
