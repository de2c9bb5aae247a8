"""Row selection and the first look at a bucket against their torch references, on the CPU where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from tests.gradients import slot_of
from tests.kernels.cpu_compiler import needs_compiler
from thinwire.kernels.cuda.bucket import cut_slots, inspect_slots
from thinwire.kernels.cuda.long_rows import LongRows
from thinwire.kernels.cuda.row_select import RowSelect
from thinwire.kernels.cuda.toolchain import kernels_for
from thinwire.kernels.exact_topk import exact_topk, make_plan
from thinwire.kernels.topk import row_topk_reference
from thinwire.layout import BucketLayout, Group, RowTable, rows_along

pytestmark = needs_compiler
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_data(kind: str, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(numel, generator=generator)
    return {
        "random": random,
        "tied": random.mul(2).round(),
        "constant": torch.full((numel,), -0.5),
        "zero": torch.zeros(numel),
        "signed zeros": torch.zeros(numel).copysign(random),
        "denormal": random * 1e-40,
        "huge": random * 1e38,
        "infinities": torch.where(random > 1.5, torch.inf, random),
        "nan": torch.where(random > 1.5, torch.nan, torch.where(random < -2, -torch.inf, random)),
    }[kind]


KINDS = (
    *("random", "tied", "constant", "zero", "signed zeros", "denormal", "huge"),
    *("infinities", "nan"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_row_select_equals_the_reference(kernels, kind):
    """Contiguous rows, strided rows, one-element rows, k = 1, k = L, and rows too long for a tile, two slots of them alike."""
    shapes = [
        ((6, 70), 1, 0.05),
        ((20, 33), 0, 0.1),
        ((5, 1), 1, 1.0),
        ((4, 16), 1, 1.0),
        ((9, 128), 1, 0.5),
        ((3, 129), 1, 0.02),
        ((2, 1024), 1, 0.9),
        ((1, 1025), 1, 0.3),
        ((2, 8192), 1, 0.01),
        ((1500, 3), 0, 0.05),
        ((1, 9000), 1, 0.01),
        ((3, 9001), 1, 0.01),
        ((2, 9000), 1, 0.01),
    ]
    rows, offset = [], 0
    for shape, axis, density in shapes:
        rows.append(rows_along(slot_of("w", shape, offset=offset), axis, density))
        offset += rows[-1].slot.numel
    table = RowTable(rows, offset)
    c = make_data(kind, offset).to(DEVICE)
    indices, values = exact_topk(c, table)
    wanted = torch.cat([row_topk_reference(r.matrix(c), r.keep).reshape(-1) for r in rows])
    assert torch.equal(indices, wanted)
    there = c[table.positions(wanted)]
    assert torch.equal(values.view(torch.int32), there.view(torch.int32))


def test_rows_that_fit_registers_are_one_launch(kernels):
    shapes = {"short": (6, 70), "long": (2, 8192), "whole": (1, 8193), "other": (1, 9000)}
    shapes |= {"too long": (2, 9000), "longer": (2, 9100)}
    rows = [rows_along(slot_of(name, shape), 1, 0.01) for name, shape in shapes.items()]
    toolchain = kernels_for(DEVICE)
    first, second, *others = make_plan(RowTable(rows, 18200), torch.float32, DEVICE, toolchain)
    assert isinstance(first, RowSelect) and len(first.rows) == 8
    assert isinstance(second, LongRows) and len(second.codec.table.rows) == 2
    assert [[rows.slot.name for rows in alike.slots] for alike in others] == [
        ["too long"],
        ["longer"],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_inspection_finds_the_largest_and_cleans_in_place(kernels, dtype):
    slots = (slot_of("a", (10,)), slot_of("b", (5000,), offset=10), slot_of("c", (7,), offset=5010))
    layout = BucketLayout(slots, 5017, dtype, DEVICE)
    group = Group.of(layout, slots, torch.float32)
    flat = torch.randn(5017).to(DEVICE, dtype)
    flat[5010:] = 0.0
    flat[4500], flat[3] = torch.nan, -torch.inf
    wanted = flat.clone()
    wanted[4500] = wanted[3] = 0.0
    largest = inspect_slots(flat, cut_slots(group), 3)
    assert torch.equal(flat, wanted)
    assert largest[0] == torch.inf
    assert largest[1].isnan()
    assert largest[2] == 0.0
    again = inspect_slots(flat, cut_slots(group), 3)
    assert again[1] == wanted[10:5010].abs().max().float()
