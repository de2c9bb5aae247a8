"""The Triton kernels against their torch references, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from tests.gradients import slot_of
from thinwire.kernels.exact_topk import select_with_kernel
from thinwire.kernels.topk import row_topk_reference
from thinwire.layout import BucketLayout
from thinwire.plan.groups import Group
from thinwire.select.rows import RowTable, rows_along

pytest.importorskip("triton")
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
    }[kind]


@pytest.mark.parametrize(
    "kind", ["random", "tied", "constant", "zero", "signed zeros", "denormal", "huge"]
)
def test_row_select_equals_the_reference(kind):
    """Contiguous rows, strided rows, one-element rows, k = 1, k = L, and rows too long for a tile, two slots of them alike."""
    shapes = [
        ((6, 70), 1, 0.05),
        ((20, 33), 0, 0.1),
        ((5, 1), 1, 1.0),
        ((4, 16), 1, 1.0),
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
    got = select_with_kernel(c, table)
    wanted = torch.cat([row_topk_reference(r.matrix(c), r.keep).reshape(-1) for r in rows])
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_inspection_finds_the_largest_and_cleans_in_place(dtype):
    from thinwire.kernels.largest import block_table, largest_and_clean

    slots = (slot_of("a", (10,)), slot_of("b", (5000,), offset=10), slot_of("c", (7,), offset=5010))
    layout = BucketLayout(slots, 5017, dtype, DEVICE)
    group = Group.of(layout, slots, torch.float32)
    flat = torch.randn(5017).to(DEVICE, dtype)
    flat[5010:] = 0.0
    flat[4500], flat[3] = torch.nan, -torch.inf
    wanted = flat.clone()
    wanted[4500] = wanted[3] = 0.0
    largest = largest_and_clean(flat, block_table(group), 3)
    assert torch.equal(flat, wanted)
    assert largest[0] == torch.inf
    assert largest[1].isnan()
    assert largest[2] == 0.0
    again = largest_and_clean(flat, block_table(group), 3)
    assert again[1] == wanted[10:5010].abs().max().float()
