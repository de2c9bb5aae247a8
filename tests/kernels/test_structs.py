"""Tables of structures: what is written is where the structure says, and what does not fit is refused."""

from __future__ import annotations

import ctypes

import pytest
import torch

from thinwire.errors import ExchangeError
from thinwire.kernels.cuda.structs import (
    declare,
    i32,
    i64,
    layout_of,
    make_rows,
    make_table,
    read_column,
    u16,
)

Inner = declare("Inner", (i64, "far"), (u16, "small other"), (i32, "number"))
Outer = declare("Outer", (Inner, "inner"), (i32, "kind unused"))


def test_tables_are_arrays_of_structures():
    inner = make_table(Inner, far=torch.tensor([1 << 40, -5]), small=[7, 65_535], number=-1)
    table = make_table(Outer, inner=inner, kind=torch.arange(2))
    structures = (Outer * 2).from_buffer_copy(bytes(table.view(torch.uint8).flatten().tolist()))
    seen = [(s.inner.far, s.inner.small, s.inner.other, s.inner.number, s.kind) for s in structures]
    assert seen == [(1 << 40, 7, 0, -1, 0), (-5, 65_535, 0, -1, 1)]
    assert read_column(Inner, inner, "small").tolist() == [7, 65_535]
    assert read_column(Inner, inner, "far").tolist() == [1 << 40, -5]


def test_rows_by_name():
    table = make_rows(Inner, [{"far": 3, "number": 4}, {"number": 6, "far": 5}])
    assert read_column(Inner, table, "far").tolist() == [3, 5]
    assert read_column(Inner, table, "number").tolist() == [4, 6]


def test_an_empty_table_has_its_words():
    assert make_table(Inner, far=torch.arange(0), number=1).shape == (0, ctypes.sizeof(Inner) // 4)


@pytest.mark.parametrize(
    "fields", [{"number": 1 << 32}, {"small": 1 << 16}, {"number": -(1 << 32)}]
)
def test_a_number_that_does_not_fit_is_refused(fields):
    with pytest.raises(ExchangeError, match="bits"):
        make_table(Inner, far=torch.arange(3), **fields)


def test_a_layout_names_every_field():
    name, check = layout_of(Outer)
    assert name == "LAYOUT_OF_Outer" and check.startswith("sizeof(Outer) == 24")
    assert "LIES_AT(Outer, kind, 16)" in check and check.count("LIES_AT") == 3
