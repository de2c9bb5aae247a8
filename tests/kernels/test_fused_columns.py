"""Strided rows under the fused kernels, run on the CPU: candidates by the last step's threshold, and the same bits without any."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator

import pytest
import torch

from tests.contracts.cluster import Cluster, kernels_of
from tests.kernels.cpu_compiler import CpuToolchain, needs_compiler
from tests.kernels.test_fused import adtopk, compare, corrected_rows, random
from tests.lanes import slow
from thinwire.kernels.cuda.columns import GROUP, WARP_COLUMN, WARP_LIST, WORD_ROWS, words_of
from thinwire.kernels.cuda.fused_topk import FusedTopK
from thinwire.layout import SlotRows

pytestmark = [needs_compiler, pytest.mark.timeout(300)]

SHAPES = {"wide": (1000, 24), "odd": (651, 13), "short": (40, 16), "cube": (9, 700, 4)}
"""Of four columns at a time and of one; lengths and numbers that fill no word and no group."""


def methods(density: float, **options):
    """Without and with momentum, along axis 0."""
    return [make(density, axis=0, **options) for make in (adtopk, corrected_rows)]


def made_for(cluster: Cluster) -> list[FusedTopK]:
    """The kernels of every rank; none if it runs the parts they stand for."""
    return [made for rank in range(cluster.world) for made in kernels_of(cluster, rank)]


def candidates(made: FusedTopK) -> Iterator[tuple[SlotRows, torch.Tensor]]:
    """Every slot's columns and bool [columns, length] in the order of memory: what was a candidate in the last step."""
    at = 0
    for rows in made.codec.table.rows:
        words, groups = words_of(rows), -(-rows.count // GROUP)
        masks = made.tables.columns.masks[at : at + groups * words * GROUP]
        at += masks.numel()
        by_column = masks.view(groups, words, GROUP).transpose(1, 2).reshape(-1, words, 1)
        bits = (by_column >> torch.arange(WORD_ROWS)).reshape(groups * GROUP, -1) & 1
        assert not bits[:, rows.length :].any()
        yield rows, bits[: rows.count, : rows.length].bool()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("density", [0.01, slow(0.1)])
def test_after_some_steps_candidates_are_few_and_enough(kernels, density, axis):
    shapes = SHAPES if axis == 0 else {"cube": (9, 700, 4), "other": (2, 300, 9)}
    fast, _ = compare(kernels, adtopk(density, axis=axis), random, shapes=shapes, steps=8)
    for made in made_for(fast):
        for rows, flags in candidates(made):
            counts = flags.sum(1)
            # Magnitudes still grow, by a twentieth in a step.
            assert (counts >= rows.keep).all() and (counts <= WARP_LIST).all()
            assert (counts <= 8 * rows.keep + 60).all() or rows.length < 100


@pytest.mark.parametrize("long", [1000, WARP_COLUMN], ids=["a block each", "a warp each"])
@pytest.mark.parametrize("which", [0, 1], ids=["residual", "momentum"])
def test_only_candidates_are_looked_at(kernels, long, which):
    """All others are made huge between the two kernels: none of them is sent."""
    kernels.tune(warp_column_elements=long)
    shapes = {"wide": (1200, 16), "odd": (1111, 9)}
    method = methods(0.02)[which]
    cluster = Cluster(1, method, shapes=shapes)
    for count in range(3):
        cluster.step(cluster.random(count))
    (made,) = made_for(cluster)
    spoiled = []

    def spoil_others(name, kernel):
        def run(blocks, threads, args):
            floats = (ctypes.c_float * made.group.numel).from_address(args.boxes[0].value)
            memory = torch.frombuffer(floats, dtype=torch.float32)
            others = torch.cat([places(rows)[~flags] for rows, flags in candidates(made)])
            kept = memory[others].clone()
            memory[others] = 1e30
            kernel(blocks, threads, args)
            assert (memory[others] == 1e30).all()
            memory[others] = kept
            spoiled.append(len(others) / len(memory))

        return run if name == "columns_send" else kernel

    made.toolchain = CpuToolchain(made.toolchain.tuning, spoil_others)
    made.prepare()
    kernels(False)
    other = Cluster(1, method, shapes=shapes)
    for count in range(6):
        right = other.step(other.random(count))
        if count >= 3:
            kernels(True)
            left = cluster.step(cluster.random(count))
            kernels(False)
    assert len(spoiled) == 3 and min(spoiled) > 0.7
    for name in shapes:
        assert torch.equal(left[0][name], right[0][name])
        assert torch.equal(cluster.residuals(0)[name], other.residuals(0)[name])


def places(rows: SlotRows) -> torch.Tensor:
    """[columns, length] in the order of memory."""
    first = rows.row_offsets().sort().values
    return first[:, None] + torch.arange(rows.length) * rows.stride


@pytest.mark.parametrize(
    ("factor", "which"),
    [(0.0, 0), slow(1e-3, 1), slow(0.3, 0), slow(3.0, 1), slow(1e3, 0), (1e3, 1)],
)
def test_gradients_that_change_at_once(kernels, factor, which):
    """Too few candidates, and more than are listed; memory is emptied, as it would even things out."""

    def gradients(cluster, count):
        if count == 4:
            for reducer in cluster.reducers:
                for name, info in cluster.infos.items():
                    for store in ("residual", "momentum")[: which + 1]:
                        assert reducer.assignments.write_memory(
                            name, store, torch.zeros(info.shape)
                        )
        return cluster.random(count, factor if count >= 4 else 1.0)

    compare(kernels, methods(0.02)[which], gradients, shapes=SHAPES, steps=6)


@pytest.mark.parametrize(
    "value", [0.0, 0.5, slow(3.0), slow(-1.0), slow(1e-42), slow(math.inf), math.nan]
)
def test_what_is_sent_does_not_depend_on_cuts(kernels, value):
    """Nor on guesses. Gradients are multiples of a half, so that many equal the cut, and the threshold."""

    def gradients(cluster, count):
        generator = torch.Generator().manual_seed(count)
        for made in made_for(cluster) if count else ():
            launch = made.tables.columns
            launch.cuts.fill_(value)
            some = torch.randint(len(launch.cuts), (len(launch.cuts) // 4,), generator=generator)
            launch.cuts[some] *= 0.5
            any_bits = torch.randint(-(1 << 31), 1 << 31, some.shape, generator=generator)
            launch.guesses[some] = any_bits.int()
        return tied(cluster, count)

    method = adtopk(0.1, axis=0, values="fp32")
    compare(kernels, method, gradients, shapes=SHAPES, steps=4, world=1)


def tied(cluster, count):
    return [
        {name: (g * 2).round() / 2 for name, g in by_name.items()}
        for by_name in cluster.random(count)
    ]


@pytest.mark.parametrize("gradients", [random, tied])
@pytest.mark.parametrize("density", [0.004, slow(0.2), 0.7])
def test_long_columns(kernels, density, gradients):
    """A block for each; more candidates than it lists, and more elements than it has room for."""
    shapes = {"long": (9000, 5), "longer": (17_000, 4), "short": (300, 4)}
    compare(kernels, adtopk(density, axis=0), gradients, shapes=shapes, steps=4, world=1)


@pytest.mark.parametrize("gradients", [random, tied])
@pytest.mark.parametrize("density", [0.005, slow(0.03), 0.06])
def test_columns_of_a_warp_by_words_and_candidates(kernels, density, gradients):
    """Two words and eight to a lane; two, four and sixteen candidates to a lane of the warp or of its block."""
    shapes = {"words": (2048, 8), "more": (2049, 9), "longest": (WARP_COLUMN, 4)}
    compare(kernels, adtopk(density, axis=0), gradients, shapes=shapes, steps=4, world=1)


def test_columns_too_crowded_for_a_block_are_cut_into_chunks(kernels):
    kernels.tune(few_columns_elements=10_000, block_candidates=100)
    shapes = {"crowded": (3000, 5), "sparse": (300, 40)}
    fast, _ = compare(kernels, adtopk(0.1, axis=0), random, shapes=shapes, steps=2)
    for made in made_for(fast):
        assert len(made.tables.multi_block_rows.rows) == 5
        assert len(made.tables.columns.cuts) == 40


@pytest.mark.parametrize("axis", [0, 1, slow(2), slow(3)])
def test_every_order_in_memory(kernels, axis):
    """Neighbours in memory need not be neighbours in the tensor."""
    shapes = {"last": (12, 40, 3, 5), "turned": (12, 8, 33, 4), "plain": (40, 5, 4, 3)}
    strides = {
        "last": permuted(shapes["last"], (0, 2, 3, 1)),
        "turned": permuted(shapes["turned"], (3, 1, 0, 2)),
    }
    for method in (adtopk(0.1, axis=axis), corrected_rows(0.1, axis=axis)):
        compare(kernels, method, random, shapes=shapes, strides=strides, steps=4)


def permuted(shape, order):
    """The strides of a tensor that lies in memory by these dimensions, the last one's elements side by side."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * shape[dim]
    return strides


@pytest.mark.parametrize(("dtype", "which"), [(torch.bfloat16, 1), (torch.float16, 0)])
def test_narrow_gradients_and_packed_indices(kernels, dtype, which):
    method = methods(0.03, indices="packed", values="fp16")[which]
    compare(kernels, method, random, shapes=SHAPES, steps=5, dtype=dtype, discard=(3,))


@pytest.mark.parametrize("which", [0, 1], ids=["residual", "momentum"])
def test_bad_and_missing_gradients_under_a_changing_scale(kernels, which):
    current = torch.tensor(1.0)

    def gradients(cluster, count):
        current.fill_([1024.0, 1024.0, 2048.0, 2048.0, 2048.0, 256.0, 256.0][count])
        made = cluster.random(count, float(current))
        if count == 3:
            made[1]["odd"][600, 7] = math.nan
            made[0]["wide"][999, 20] = math.inf
        if count == 5:
            for by_name in made:
                by_name["short"].zero_()
        return made

    compare(kernels, methods(0.03)[which], gradients, shapes=SHAPES, steps=7, scale=lambda: current)


def test_a_scale_that_changes_moves_cuts_with_it(kernels):
    current = torch.tensor(1.0)
    cluster = Cluster(1, adtopk(0.02, axis=0), shapes={"wide": (1000, 24)}, scale=lambda: current)
    for count, factor in enumerate([1.0] * 5 + [0.125, 64.0]):
        current.fill_(factor)
        cluster.step(cluster.random(count, factor))
        (made,) = made_for(cluster)
        ((rows, flags),) = candidates(made)
        counts = flags.sum(1)
        assert count < 4 or ((rows.keep <= counts).all() and (counts < 200).all())
