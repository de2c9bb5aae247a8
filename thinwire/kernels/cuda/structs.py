"""Structures that Python writes and the CUDA sources read.

Each is a `ctypes.Structure` here and a struct of the same name in a source. The compiler checks that both agree: see `layout_of`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.errors import ExchangeError

Struct = type[ctypes.Structure]
i32, i64, u16, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint16, ctypes.c_void_p
f32 = ctypes.c_float


def declare(name: str, *fields: tuple[type, str]) -> Struct:
    """A structure with these fields: a type, and the names of the neighbours that have it."""
    pairs = [(field, kind) for kind, names in fields for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": pairs})


def layout_of(kind: Struct) -> tuple[str, str]:
    """A define for `static_assert`: whether the source's struct has these fields at these places, and no others."""
    name = kind.__name__
    places = [
        f"LIES_AT({name}, {field[0]}, {getattr(kind, field[0]).offset})" for field in kind._fields_
    ]
    return f"LAYOUT_OF_{name}", " && ".join([f"sizeof({name}) == {ctypes.sizeof(kind)}", *places])


def make_table(kind: Struct, /, **columns: Tensor | Sequence[int] | int) -> Tensor:
    """int32 [structures, words] on the CPU.

    A column has a number for each structure, or one for all; that of a structure inside is a table itself. Fields without a
    column are 0.
    """
    given = {name: torch.as_tensor(column) for name, column in columns.items()}
    count = max(len(column) for column in given.values() if column.dim())
    table = torch.zeros(count, ctypes.sizeof(kind), dtype=torch.uint8)
    for name, column in given.items():
        place = getattr(kind, name)
        if column.dim() < 2:
            _check_range(kind, name, column, 8 * place.size)
            column = column.long().expand(count).contiguous()[:, None]
        # Little endian: the low bytes come first.
        raw = column.contiguous().view(torch.uint8)[:, : place.size]
        table[:, place.offset : place.offset + place.size] = raw
    return table.view(torch.int32)


def make_room(kind: Struct, count: int, device: torch.device) -> Tensor:
    """int32 [structures, words] on a device: zeros that kernels fill."""
    return torch.zeros(count, ctypes.sizeof(kind) // 4, dtype=torch.int32, device=device)


def make_rows(kind: Struct, rows: Sequence[Mapping[str, int]]) -> Tensor:
    """The same from one mapping for each structure; all have the same keys."""
    return make_table(kind, **{name: [row[name] for row in rows] for name in rows[0]})


def _check_range(kind: Struct, name: str, column: Tensor, bits: int) -> None:
    if bits == 64 or not column.numel():
        return
    low, high = column.aminmax()
    if low < -(1 << (bits - 1)) or high >= 1 << bits:
        raise ExchangeError(f"{kind.__name__}.{name} is {int(high)}, it has {bits} bits")


def read_column(kind: Struct, table: Tensor, name: str) -> Tensor:
    """int64 [structures]: one field of every structure of a table."""
    place = getattr(kind, name)
    raw = table.contiguous().view(torch.uint8)[:, place.offset : place.offset + place.size]
    dtype = {2: torch.uint16, 4: torch.int32, 8: torch.int64}[place.size]
    return raw.contiguous().view(dtype)[:, 0].long()


Row = declare(
    "Row",
    (i64, "gradient memory values indices"),
    (i32, "length keep stride slot width"),
    (u16, "vector quads"),
    (i32, "aim entry"),
)
"""row.cuh: one row of a group, and where its entries are in the payload."""
