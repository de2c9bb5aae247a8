"""Row geometry and exact selection against a naive reference."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import thinwire as tw
from tests.contracts.cluster import parameter
from thinwire.kernels.topk import row_topk, row_topk_reference
from thinwire.layout import (
    RowTable,
    Shard,
    Slot,
    SlotKind,
    SlotRows,
    contiguous_strides,
    keep_count,
    memory_strides,
    resolve_axis,
)
from thinwire.select.topk import AllDimensionTopK, TradTopK

QUICK = settings(max_examples=60, deadline=None)
DENSITIES = st.sampled_from([1e-6, 0.01, 0.1, 0.29, 0.5, 0.999, 1.0])


@st.composite
def slots(draw) -> Slot:
    """Any shape of up to four dimensions in any order of memory, somewhere in a buffer."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    tensor = torch.empty([shape[dim] for dim in order]).permute(
        [order.index(dim) for dim in range(len(shape))]
    )
    assert list(tensor.shape) == shape
    kind = draw(st.sampled_from(list(SlotKind)))
    info = parameter("p", shape, strides=memory_strides(tensor), kind=kind)
    return info.slot(draw(st.integers(0, 7)))


def naive_rows(slot: Slot, flat: Tensor, axis: int | str) -> list[Tensor]:
    """The rows by plain indexing of the logical view, row by row."""
    view = slot.view(flat)
    if axis == "tensor":
        return [slot.span(flat)]
    if axis == "flatten":
        length = slot.numel // slot.shape[0]
        starts = [slot.offset + out * slot.strides[0] for out in range(slot.shape[0])]
        return [flat[start : start + length] for start in starts]
    others = [range(size) for dim, size in enumerate(slot.shape) if dim != axis]
    return [
        view[(*places[:axis], slice(None), *places[axis:])] for places in itertools.product(*others)
    ]


def naive_topk(row: Tensor, keep: int) -> list[int]:
    """The `keep` largest magnitudes, ties to the lowest index, in ascending order."""
    order = sorted(range(len(row)), key=lambda i: (-abs(float(row[i])), i))
    return sorted(order[:keep])


def check(rows: SlotRows, slot: Slot, axis: int | str, density: float, seed: int) -> None:
    numel = slot.offset + slot.numel + 3
    # Few different values, so that most rows have ties.
    flat = torch.randint(-3, 4, (numel,), generator=torch.Generator().manual_seed(seed)).float()
    table = RowTable([rows], numel)
    places = torch.arange(numel)
    expected = naive_rows(slot, places, axis)
    everything = rows.matrix(places).reshape(-1, rows.length)
    assert everything.tolist() == [row.tolist() for row in expected]
    assert sorted(everything.reshape(-1).tolist()) == list(
        range(slot.offset, slot.offset + slot.numel)
    )
    assert rows.row_offsets().tolist() == [int(row[0]) for row in expected]
    assert rows.keep == max(1, math.floor(round(rows.length * density, 9)))
    picks = TradTopK(0.5).pick(flat, table)
    naive = [naive_topk(row, rows.keep) for row in naive_rows(slot, flat, axis)]
    assert picks.indices.tolist() == list(itertools.chain(*naive))
    assert torch.equal(picks.values, flat[table.positions(picks.indices)])


@given(slots(), DENSITIES, st.integers(-4, 3), st.integers(0, 9))
@QUICK
def test_fibres_along_any_axis_partition_the_tensor_and_pick_like_the_reference(
    slot, density, axis, seed
):
    ndim = len(slot.shape)
    if not -ndim <= axis < ndim:
        with pytest.raises(tw.UsageError, match=f"axis is {axis}; parameter 'p'"):
            AllDimensionTopK(density, axis).rows(slot)
        return
    check(AllDimensionTopK(density, axis).rows(slot), slot, axis % ndim, density, seed)


@given(slots(), DENSITIES, st.integers(0, 9))
@QUICK
def test_auto_axis_partitions_the_tensor_and_picks_like_the_reference(slot, density, seed):
    rows = AllDimensionTopK(density).rows(slot)
    check(rows, slot, resolve_axis(slot, "auto"), density, seed)


@given(slots(), DENSITIES, st.integers(0, 9))
@QUICK
def test_whole_tensor_is_one_row(slot, density, seed):
    check(TradTopK(density).rows(slot), slot, "tensor", density, seed)


@pytest.mark.parametrize(
    ("kind", "shape", "axis"),
    [
        (SlotKind.LINEAR, (8, 16), 1),
        (SlotKind.CONV, (8, 4, 3, 3), "flatten"),
        (SlotKind.EMBEDDING, (100, 16), 0),
        (SlotKind.TRANSPOSED_LINEAR, (16, 8), 0),
    ],
)
def test_auto_axis_goes_by_the_kind_of_layer(kind, shape, axis):
    slot = parameter("p", shape, kind=kind).slot(0)
    assert resolve_axis(slot, "auto") == axis
    assert resolve_axis(slot, "published") == 1


def test_channels_last_convolution_still_has_one_row_per_output():
    weight = torch.empty(8, 4, 3, 3).to(memory_format=torch.channels_last)
    slot = parameter("p", weight.shape, strides=weight.stride(), kind=SlotKind.CONV).slot(5)
    rows = AllDimensionTopK(0.1).rows(slot)
    assert (rows.count, rows.length, rows.keep) == (8, 36, 3)
    check(rows, slot, "flatten", 0.1, 0)


@pytest.mark.parametrize(
    ("length", "density", "keep"),
    [(100, 0.29, 29), (100, 0.01, 1), (99, 0.01, 1), (1000, 0.07, 70), (3, 1.0, 3), (1, 1e-9, 1)],
)
def test_k_is_the_floor_in_decimal_arithmetic_and_at_least_one(length, density, keep):
    assert keep_count(length, density) == keep


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 99), st.data())
@QUICK
def test_fast_topk_is_the_reference_bit_for_bit(count, length, seed, data):
    keep = data.draw(st.integers(1, length))
    generator = torch.Generator().manual_seed(seed)
    for matrix in (
        torch.randn(count, length, generator=generator),
        torch.randint(-2, 3, (count, length), generator=generator).float(),
        torch.zeros(count, length),
        torch.full((count, length), -0.0),
        torch.randn(count, length, generator=generator) * 1e-42,
        torch.randn(count, length, generator=generator) * 3e38,
        torch.randn(count, length, generator=generator).double(),
        torch.randn(count, length, generator=generator).bfloat16(),
    ):
        assert torch.equal(row_topk(matrix, keep), row_topk_reference(matrix, keep))


@pytest.mark.parametrize("density", [0, 0.0, -0.1, 2, 1.0001, float("nan"), "x", True, None])
def test_bad_density_gets_one_sentence(density):
    for build in (tw.ADTopK, tw.TopK):
        with pytest.raises(tw.UsageError) as caught:
            build(density=density)
        message = str(caught.value)
        assert message.startswith(f"density is {density!r}; it must be a number in (0, 1]")


@pytest.mark.parametrize("axis", ["rows", 1.5, True, None])
def test_bad_axis_gets_one_sentence(axis):
    with pytest.raises(tw.UsageError, match=r"axis is .*; it must be 'auto', 'published' or"):
        tw.ADTopK(axis=axis)


@pytest.mark.parametrize(
    ("shape", "length"),
    [((64, 128), 4096), ((96, 100), 3200), ((7, 1031), 1031), ((5, 1013), 5065), ((12,), 12)],
)
def test_chunks_divide_the_tensor(shape, length):
    slot = Slot("w", shape, contiguous_strides(shape), 0, SlotKind.LINEAR, Shard(shape))
    rows = tw.select.ChunkwiseTopK(1 / 64).rows(slot)
    assert rows.length == length and rows.count * rows.length == slot.numel
    assert rows.keep == max(1, length // 64)
