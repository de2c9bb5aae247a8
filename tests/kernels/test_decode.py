"""decode.cu and decode_counted.cu, run on the CPU: every way in which entries are found and sums are written."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster, kernels_of
from tests.kernels.cpu_compiler import needs_compiler
from tests.kernels.test_fused import adtopk, compare, random
from tests.lanes import slow
from thinwire.kernels.cuda.decode_parts import COLUMNS, PIECE, ROWS, cut_pieces, cut_rows
from thinwire.kernels.cuda.fused_topk import FusedTopK
from thinwire.layout import Slot, SlotRows, rows_along

pytestmark = [needs_compiler, pytest.mark.timeout(300)]
WORLDS = [1, 4, 7, slow(33), slow(70)]
"""Fewer and more ranks than are read at once, than lanes ask for, than edges are kept of."""
TILED = {"few entries": (600, 20), "many": (700, 5), "searched": (2100, 18), "shifted": (3,)}


@pytest.mark.parametrize("world", WORLDS)
def test_rows_and_pieces_of_many_ranks(kernels, world):
    shapes = {"odd": (5, 7), "rows": (9, 130), "all read": (1, 9000), "searched": (1, 17_003)}
    compare(kernels, adtopk(0.02), random, shapes=shapes, steps=1, world=world)


@pytest.mark.parametrize("world", WORLDS)
def test_tiles_of_many_ranks(kernels, world):
    compare(kernels, adtopk(0.03, axis=0), random, shapes=TILED, steps=1, world=world)


@pytest.mark.parametrize("indices", ["int32", "packed"])
@pytest.mark.parametrize("values", ["fp32", "fp16"])
def test_codes_of_tiles_and_pieces(kernels, indices, values):
    tiles = adtopk(0.05, axis=0, indices=indices, values=values)
    compare(kernels, tiles, random, shapes=TILED, steps=1, world=3)
    whole = tw.TopK(density=0.05, dense_fallback=False, indices=indices, values=values)
    compare(kernels, whole, random, shapes={"a": (3, 7001), "b": (41, 13)}, steps=1, world=3)


@pytest.mark.parametrize("density", [0.004, 0.5])
def test_columns_that_lie_apart(kernels, density):
    """Along the middle of three axes, neighbours are next to each other in runs that end inside a tile."""
    shapes = {"runs": (4, 900, 9), "aligned": (3, 600, 16), "narrow": (2, 300, 1)}
    compare(kernels, adtopk(density, axis=1), random, shapes=shapes, steps=1)


@pytest.mark.parametrize("skew", [0.5, 0.001])
def test_entries_that_crowd_in_one_place(kernels, skew):
    def gradients(cluster, count):
        made = cluster.random(count)
        for by_name in made:
            for name, g in by_name.items():
                flat = g.view(-1)
                flat[: int(flat.numel() * (1 - skew))] *= 1e-6
                by_name[name] = g
        return made

    whole = tw.TopK(density=0.05, dense_fallback=False)
    compare(kernels, whole, gradients, shapes={"a": (2, 30_011)}, steps=1, world=5)
    tiles = adtopk(0.1, axis=0)
    compare(kernels, tiles, gradients, shapes={"a": (3001, 17)}, steps=1, world=5)


def made_for(shape: tuple[int, ...], method: tw.Method, world: int) -> FusedTopK:
    cluster = Cluster(world, method, shapes={"w": shape})
    cluster.step(cluster.random(0))
    (made,) = kernels_of(cluster)
    return made


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((9, 130), 1), ((1, 9000), 1), ((2, 40_000), 1), ((700, 5), 0), ((3000, 20), 0)],
)
@pytest.mark.parametrize("wrong", [-1, "length", 1 << 30])
@pytest.mark.parametrize("place", [0.0, 0.37, 1.0])
def test_any_index_outside_its_row_is_found(kernels, shape, axis, wrong, place):
    """Whichever entry it is: every place is looked at by one block at least, or the order of their edges is wrong."""
    made = made_for(shape, adtopk(0.02, indices="int32", axis=axis), 2)
    buckets = [torch.randn(shape[0] * shape[1]) for _ in range(2)]
    sent = [made.encode(one.clone(), *2 * [torch.zeros(one.numel())], None) for one in buckets]
    gathered = torch.stack(sent)
    made.decode(gathered, buckets[0])
    assert not made.wrong
    indices = made.payload(gathered[1])[made.codec.indices_at :].view(torch.int32)
    last = made.codec.table.entries - 1
    indices[int(place * last)] = shape[axis] if wrong == "length" else wrong
    made.decode(gathered, buckets[0])
    assert made.wrong


def slot_rows(shape: tuple[int, ...], axis: int) -> SlotRows:
    slot: Slot = Cluster(1, adtopk(), shapes={"w": shape}).infos["w"].slot(0)
    return rows_along(slot, axis, 0.01)


def test_blocks_take_rows_of_equal_numbers():
    parts = cut_rows(slot_rows((64, 576), 1), 10)
    assert parts[:, 0].eq(ROWS).all() and parts[:, 2].tolist() == [13, 13, 13, 13, 12]
    assert parts[:, 1].tolist() == [10, 23, 36, 49, 62]
    assert int(parts[0, 2]) * 576 <= PIECE


def test_only_columns_next_to_each_other_are_joined():
    (joined,) = cut_pieces(slot_rows((30, 2 * COLUMNS), 0), 0)[:, 5].unique().tolist()
    assert joined == 1
    assert 0 in cut_pieces(slot_rows((3, 30, COLUMNS + 1), 1), 0)[:, 5]
