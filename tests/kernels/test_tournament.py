"""Top-k on the CPU against the reference, bit for bit, on everything gradients can look like."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.gradients import slot_of
from thinwire.kernels.exact_topk import AlikeRows, TournamentRows, exact_topk, make_plan
from thinwire.kernels.topk import row_topk, row_topk_reference
from thinwire.kernels.tournament import LEAST_RATIO, Portions, Strip, Tournament, choose, find_ones
from thinwire.layout import RowTable, SlotKind
from thinwire.select.topk import AllDimensionTopK, TradTopK

KINDS = [
    "random",
    "heavy tails",
    "tied",
    "few bits",
    "constant",
    "zero",
    "signed zeros",
    "some rows zero",
    "sparse",
    "denormal",
    "huge",
    "infinities",
    "an outlier",
    "nan",
]


def make_data(kind: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    random = torch.randn(shape, generator=generator)
    spread = torch.randn(shape, generator=generator)
    flat = random.clone().view(-1)
    odd = {"infinities": -torch.inf, "nan": torch.nan, "an outlier": 1e20}.get(kind, 0.0)
    flat[5 :: max(7, flat.numel() // 9)] = odd
    half = random.clone()
    half[: (shape[0] + 1) // 2] = 0.0
    return {
        "random": random,
        "heavy tails": random * (2 * spread).exp(),
        "tied": random.mul(2).round(),
        "few bits": random.bfloat16().float(),
        "constant": torch.full(shape, -0.5),
        "zero": torch.zeros(shape),
        "signed zeros": torch.zeros(shape).copysign(random),
        "some rows zero": half,
        "sparse": random * (spread > 2.3),
        "denormal": random * 1e-42,
        "huge": random * 3e37,
        "infinities": flat.view(shape),
        "an outlier": flat.view(shape),
        "nan": flat.view(shape),
    }[kind]


def check(data: Tensor, keep: int, portions: Portions | None = None) -> None:
    """`data` is [outer, length, inner], as it lies in memory; one element lies before it and one behind."""
    outer, length, inner = data.shape
    edge = torch.full((1,), 9e9, dtype=data.dtype)
    flat = torch.cat([edge, data.reshape(-1), edge])
    tournament = Tournament([Strip(1, outer, length * inner, inner)], length, keep, portions)
    indices, values = (chosen.view(outer, inner, keep) for chosen in tournament.run(flat))
    rows = data.movedim(1, -1)
    assert torch.equal(indices, row_topk_reference(rows, keep))
    assert torch.equal(bits(values), bits(rows.gather(-1, indices)))


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int64 if values.dtype == torch.float64 else torch.int32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "keep"),
    [
        ((40, 256, 1), 2),
        ((9, 650, 1), 6),
        ((5, 97, 1), 1),
        ((1, 40_000, 1), 400),
        ((1, 3001, 7), 30),
        ((3, 200, 5), 4),
    ],
)
def test_rows_of_any_data_give_the_reference(kind, shape, keep):
    check(make_data(kind, shape), keep)


def test_64_bits_give_the_reference():
    for kind in KINDS:
        check(make_data(kind, (4, 500, 1)).double() * 1.1, 5)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 200), st.data())
@settings(max_examples=100, deadline=None)
def test_any_shape_with_ties_gives_the_reference(outer, inner, keep, more, data):
    length = LEAST_RATIO * keep + more
    steps = data.draw(st.sampled_from([1, 3, 20, 1000]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    numbers = torch.randint(-steps, steps + 1, (outer, length, inner), generator=generator)
    check(numbers.float(), keep)


def test_work_in_many_parts_gives_the_reference():
    """Parts of rows, of strips and of hits."""
    portions = Portions(buffer=512, hits=10, chosen=300)
    for kind in ("random", "tied", "some rows zero"):
        check(make_data(kind, (7, 1500, 1)), 15, portions)
        check(make_data(kind, (2, 400, 9)), 4, portions)


@given(st.integers(1, 6), st.integers(1, 30), st.data())
def test_choose_takes_the_largest_and_the_first_of_equals(rows, length, data):
    keep = data.draw(st.integers(1, length))
    drawn = st.lists(st.sampled_from([0.0, 1.0, 2.0, torch.inf, torch.nan]), min_size=length)
    table = torch.tensor([data.draw(drawn)[:length] for _ in range(rows)])
    assert torch.equal(choose(table, keep), row_topk_reference(table, keep))


@given(st.lists(st.booleans(), max_size=200))
def test_ones_are_found_in_order(drawn):
    mask = torch.tensor([*drawn, *[False] * (-len(drawn) % 16)])
    assert torch.equal(find_ones(mask.float()), mask.nonzero().view(-1))


def mixed_table(selector) -> RowTable:
    """Linear layers of one shape apart from each other, an embedding, convolutions, and small ones."""
    shapes = [
        ((300, 500), SlotKind.LINEAR),
        ((900, 160), SlotKind.EMBEDDING),
        ((300, 500), SlotKind.LINEAR),
        ((64, 32, 9, 9), SlotKind.CONV),
        ((5, 7), SlotKind.LINEAR),
        ((40, 3), SlotKind.TRANSPOSED_LINEAR),
    ]
    rows, offset = [], 0
    for which, (shape, kind) in enumerate(shapes):
        rows.append(selector.rows(slot_of(f"p{which}", shape, kind, offset)))
        offset += rows[-1].slot.numel + which
    return RowTable(rows, offset)


@pytest.mark.parametrize(
    "selector",
    [
        AllDimensionTopK(0.01),
        AllDimensionTopK(0.01, axis=0),
        AllDimensionTopK(0.01, axis="published"),
        AllDimensionTopK(0.3),
        TradTopK(0.01),
    ],
    ids=repr,
)
def test_a_table_of_many_kinds_gives_the_reference(selector):
    table = mixed_table(selector)
    for kind in ("random", "few bits", "some rows zero"):
        c = make_data(kind, (table.numel,))
        indices, values = exact_topk(c, table)
        wanted = [row_topk_reference(r.matrix(c), r.keep).reshape(-1) for r in table.rows]
        assert torch.equal(indices, torch.cat(wanted))
        assert torch.equal(bits(values), bits(c[table.positions(indices)]))


def test_slots_of_one_kind_share_a_tournament_and_small_ones_have_none():
    table = mixed_table(AllDimensionTopK(0.01))
    plan = make_plan(table, torch.float32, torch.device("cpu"), None)
    tournaments = [part.members for part in plan if isinstance(part, TournamentRows)]
    others = [part.slots for part in plan if isinstance(part, AlikeRows)]
    assert tournaments == [[0, 2], [1], [3]]
    assert [[rows.slot.name for rows in slots] for slots in others] == [["p4"], ["p5"]]


def test_views_of_a_larger_buffer_are_read_where_they_lie():
    c = torch.cat([torch.full((11,), 1e9), make_data("random", (400_000,))])[11:]
    table = RowTable([TradTopK(0.01).rows(slot_of("w", (400_000,)))], 400_000)
    assert torch.equal(exact_topk(c, table)[0], row_topk_reference(c, 4000))
    matrix = c.view(1000, 400).t()
    assert torch.equal(row_topk(matrix, 7), row_topk_reference(matrix, 7))
