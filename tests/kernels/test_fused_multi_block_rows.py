"""Whole tensors in the fused kernels, run on the CPU: the bits of the parts they stand for, whichever way a tensor goes."""

from __future__ import annotations

import math

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import kernels_of
from tests.kernels.cpu_compiler import needs_compiler
from tests.kernels.test_fused import compare, dgc, random
from tests.lanes import slow
from thinwire.kernels.cuda.multi_block_rows import RowState, histograms_of
from thinwire.kernels.cuda.structs import read_column
from thinwire.kernels.cuda.tuning import Tuning

pytestmark = [needs_compiler, pytest.mark.timeout(300)]
READY, AGAIN, FEW, SLOW = range(4)
SHAPES = {"tensor": (3, 18_001), "even": (5, 4096)}
SIZES = {
    "tens": (5, 10),
    "odd": (7, 11),
    "chunk": (64, 64),
    "more": (17, 241),
    "tiny": (2, 2),
    "one": (1, 1),
    "even": (3, 4096),
    "long": (41, 1000),
    "longer": (301, 333),
}


def topk(density=0.01, **options):
    return tw.TopK(density=density, dense_fallback=False, **options)


def multi_block_rows_of(cluster):
    """Of rank 0; None where the kernels are off."""
    made = kernels_of(cluster)
    return made[0].tables.multi_block_rows if made else None


def ways(cluster):
    """The way of every tensor in the last step."""
    return read_column(RowState, multi_block_rows_of(cluster).row_states, "way").tolist()


def watched(gradients_of, seen):
    """The same gradients; `seen` gets the ways of the step before."""

    def gradients(cluster, count):
        if count and multi_block_rows_of(cluster):
            seen.append(ways(cluster))
        return gradients_of(cluster, count)

    return gradients


def run(kernels, method, gradients_of, **options):
    """Compare, and give the ways of all steps."""
    seen = []
    options = {"shapes": SHAPES, "steps": 4, **options}
    (cluster, _) = compare(kernels, method, watched(gradients_of, seen), **options)
    return [*seen, ways(cluster)]


def all_of(seen):
    return {way for step in seen for way in step}


def changed(change):
    """Random gradients after `change(gradient, count)`."""

    def gradients(cluster, count):
        return [
            {name: change(g, count) for name, g in by_name.items()}
            for by_name in cluster.random(count)
        ]

    return gradients


@pytest.mark.parametrize("density", [0.01, 0.002])
def test_memory_is_passed_over_once_in_stable_steps(kernels, density):
    seen = run(kernels, topk(density), random, steps=9, world=1)
    assert seen[0] == [AGAIN, AGAIN], "nothing is known in the first step"
    assert seen[5:] == [[READY, READY]] * 4


def test_candidates_are_about_twice_as_many_as_are_sent(kernels):
    (cluster, _) = compare(kernels, topk(), random, shapes=SHAPES, steps=12, world=1)
    table = multi_block_rows_of(cluster)
    for number, (row, shape) in enumerate(zip(table.row_states, SHAPES.values(), strict=True)):
        first, chunks = row[:2].tolist()
        listed = int(table.sections[first : first + chunks, 1].sum())
        keep = math.prod(shape) // 100
        assert keep < listed < 4 * keep, number


@pytest.mark.parametrize("factor", [1.5, 1000.0, 1e8])
def test_sudden_growth(kernels, factor):
    grown = changed(lambda g, count: g * (factor if count >= 5 else 1.0))
    seen = run(kernels, topk(), grown, steps=8, world=1)
    assert SLOW not in all_of(seen)
    assert factor < 2 or seen[5] == [AGAIN, AGAIN]


def test_gradients_that_vanish_find_enough_in_memory(kernels):
    fading = changed(lambda g, count: g * (1e-3 if count >= 5 else 1.0))
    seen = run(kernels, topk(), fading, steps=8, world=1)
    assert seen[5:] == [[READY, READY]] * 3


@pytest.mark.parametrize("density", [0.01, 0.1])
def test_norms_that_differ_from_step_to_step(kernels, density):
    uneven = changed(lambda g, count: g * (1.0, 0.4, 2.0, 1.3, 0.5, 1.8, 0.3, 1.0)[count])
    assert SLOW not in all_of(run(kernels, topk(density), uneven, steps=8, world=1))


def test_sudden_shrinking(kernels):
    """A gradient that cancels what memory holds leaves too few candidates."""

    def gradients(cluster, count):
        made = cluster.random(count)
        if count == 5:
            for rank, by_name in enumerate(made):
                held = cluster.residuals(rank)
                by_name.update({n: g * 1e-3 - held[n] for n, g in by_name.items()})
        return made

    seen = run(kernels, topk(), gradients, steps=8)
    assert seen[5] == [SLOW, SLOW]


def test_a_new_scale_moves_the_cut(kernels):
    current = torch.tensor(1024.0)

    def scaled(cluster, count):
        current.fill_(1024.0 if count < 5 else 64.0 if count < 7 else 65_536.0)
        return [
            {name: g * (current / 1024) for name, g in by_name.items()}
            for by_name in cluster.random(count)
        ]

    seen = run(kernels, topk(), scaled, steps=9, world=1, scale=lambda: current)
    assert seen[5:] == [[READY, READY]] * 4


@pytest.mark.parametrize("count_of", [3, 600, 2000, 20_000])
def test_ties_at_the_cut(kernels, count_of):
    """Fewer than are sent, more than the list of a bin holds, more than that of candidates holds, of one tensor or both."""

    def tie(g, count):
        flat = g.flatten() * 0.1
        flat[count :: len(flat) // count_of] = 5.0
        return flat.view(g.shape)

    seen = run(kernels, topk(), changed(tie), steps=4)
    assert (SLOW in all_of(seen)) == (count_of >= 2000)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        *((kind, "fp32") for kind in ("zeros", "few", "some", "constant", "tiny", "huge")),
        *(slow(kind, "fp16") for kind in ("zeros", "few", "some", "constant")),
        *((kind, "fp16") for kind in ("tiny", "huge")),
    ],
)
def test_degenerate_tensors(kernels, kind, values):
    changes = {
        "zeros": lambda g, count: torch.zeros_like(g),
        "few": lambda g, count: torch.where(g > 3.2, g, 0.0),
        "some": lambda g, count: torch.where(g > 3.2 - count, g, 0.0),
        "constant": lambda g, count: torch.full_like(g, -0.25),
        "tiny": lambda g, count: g * 1e-41,
        "huge": lambda g, count: g * 2e37,
    }
    seen = run(kernels, topk(values=values), changed(changes[kind]), steps=3)
    if kind == "zeros":
        assert seen == [[FEW, FEW]] * 3
    if kind == "few":
        assert seen[0] == [FEW, FEW]


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_bad_gradients(kernels, value):
    def gradients(cluster, count):
        made = cluster.random(count)
        if count in (1, 2):
            made[1]["tensor"][2, 5] = made[0]["even"][4, 4000] = value
        return made

    run(kernels, topk(), gradients)
    run(kernels, dgc(0.01), gradients)


@pytest.mark.parametrize(
    ("density", "indices"),
    [
        *((1e-7, "int32"), (0.03, "packed"), (0.5, "int32"), (1.0, "packed")),
        *(slow(1e-7, "packed"), slow(0.03, "int32"), slow(0.5, "packed"), slow(1.0, "int32")),
    ],
)
def test_tensors_of_all_sizes_in_one_bucket(kernels, density, indices):
    grow = changed(lambda g, count: g * (1.0, 1.0, 30.0, 0.01)[count])
    seen = run(kernels, topk(density, indices=indices), grow, shapes=SIZES, world=1)
    assert [len(step) for step in seen] == [len(SIZES)] * 4, "all of them share the launches"


@pytest.mark.parametrize("dtype", [slow(torch.bfloat16), torch.float16])
def test_narrow_gradients(kernels, dtype):
    run(kernels, topk(), random, dtype=dtype)
    run(kernels, dgc(0.02, nesterov=True), random, dtype=dtype)


@pytest.mark.parametrize(
    ("nesterov", "masking"), [(True, True), slow(True, False), slow(False, True), (False, False)]
)
def test_momentum(kernels, nesterov, masking):
    method = dgc(0.01, nesterov=nesterov, masking=masking)
    seen = run(kernels, method, random, steps=8, discard=(3,))
    assert SLOW not in all_of(seen)


def test_several_histograms(kernels):
    """As tensors of more chunks have them."""
    kernels.tune(histogram_chunks=2)
    seen = run(kernels, topk(), random, steps=8, world=1)
    assert seen[5:] == [[READY, READY]] * 3
    tuning = Tuning(histogram_chunks=2)
    assert [histograms_of(n, tuning) for n in (1, 2, 3, 5, 14, 900)] == [1, 1, 2, 4, 8, 16]


def test_more_in_the_deciding_bin_than_are_compared_each_with_each(kernels):
    kernels.tune(entries_per_edge=1)

    def crowd(g, count):
        flat = g.flatten() * 0.1
        some = flat[:: len(flat) // 700]
        some.copy_(
            5.0 + 1e-4 * torch.rand(len(some), generator=torch.Generator().manual_seed(count))
        )
        return flat.view(g.shape)

    seen = run(kernels, topk(), changed(crowd), world=1)
    assert SLOW not in all_of(seen)


@pytest.mark.parametrize("tied", [slow(False), True])
def test_more_chunks_than_are_placed_in_one_round(kernels, tied):
    kernels.tune(chunk_elements=16)
    gradients = changed(lambda g, count: (2 * g).round() if tied else g)
    run(kernels, topk(), gradients, shapes={"tensor": (7, 10_000)}, steps=3, world=1)


def test_few_crowded_columns(kernels):
    kernels.tune(few_columns_elements=20_000, block_candidates=100)
    method = tw.ADTopK(density=0.01, axis=0, dense_fallback=False)
    shapes = {"columns": (9001, 3), "cube": (20_000, 1, 2)}
    seen = run(kernels, method, random, shapes=shapes, steps=6)
    assert len(seen[0]) == 5 and seen[5] == [READY] * 5


def test_room_for_candidates_is_a_few_percent_of_the_bucket(kernels):
    shapes = {"large": (600, 1024), "other": (64, 4096)}
    (cluster, _) = compare(kernels, topk(), random, shapes=shapes, steps=1, world=1)
    table = multi_block_rows_of(cluster)
    buffers = (table.list_values, table.list_places, table.edges, table.histograms, table.sections)
    bucket = 4 * sum(math.prod(shape) for shape in shapes.values())
    assert sum(buffer.nbytes for buffer in buffers) < 0.1 * bucket
