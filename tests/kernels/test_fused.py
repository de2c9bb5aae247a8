"""The fused CUDA kernels, run on the CPU, give the bits of the parts they stand for."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster, kernels_of
from tests.kernels.cpu_compiler import needs_compiler
from thinwire.compress.dense import DenseKernelRoute
from thinwire.compress.kernel_routes import KernelAccount
from thinwire.kernels.cuda.fused_topk import FusedTopK
from thinwire.kernels.cuda.register_rows import (
    ROW_WARP_COUNTS,
    RowBlock,
    register_shape,
)
from thinwire.kernels.cuda.structs import read_column

pytestmark = [needs_compiler, pytest.mark.timeout(300)]

SHAPES = {
    "short": (5, 7),
    "row": (3, 128),
    "odd": (4, 131),
    "conv": (6, 3, 3, 3),
    "wide": (2, 1300),
    "last": (2, 36),
}


KINDS = ("update", "residual", "momentum")


def compare(
    kernels,
    method,
    gradients_of,
    *,
    steps=3,
    world=2,
    shapes=SHAPES,
    discard=(),
    buckets=None,
    **options,
):
    """Run the same steps with and without kernels; every bit of update, residual and momentum must agree."""
    clusters = []
    for on in (True, False):
        kernels(on)
        clusters.append(Cluster(world, method, shapes=shapes, **options))
        clusters[-1].buckets = buckets or clusters[-1].buckets
        results = []
        for count in range(steps):
            gradients = gradients_of(clusters[-1], count)
            updates = clusters[-1].step(gradients)
            residuals = [clusters[-1].residuals(rank) for rank in range(world)]
            results.append((updates, residuals, momenta(clusters[-1])))
            if count in discard:
                for reducer in clusters[-1].reducers:
                    reducer.settle(discard=True)
                residuals = [clusters[-1].residuals(rank) for rank in range(world)]
                results.append((updates, residuals, momenta(clusters[-1])))
        if on:
            fast = results
            accounts = [a for p in clusters[-1].reducers for a in p.record.accounts]
            assert any(isinstance(a, KernelAccount) for a in accounts), "the kernels did not run"
    for count, (ours, theirs) in enumerate(zip(fast, results, strict=True)):
        for rank in range(world):
            for name in shapes:
                for kind, mine, other in zip(KINDS, ours, theirs, strict=True):
                    left, right = mine[rank][name], other[rank][name]
                    assert torch.equal(left.nan_to_num(nan=7e7), right.nan_to_num(nan=7e7)), (
                        f"{kind} of {name} on rank {rank} in step {count}"
                    )
    return clusters


def momenta(cluster):
    """Every rank's momentum by name, zeros where the memory has none."""
    held = [
        {name: p.assignments.held(name, "momentum") for name in cluster.infos}
        for p in cluster.reducers
    ]
    return [
        {name: torch.zeros(1) if u is None else u for name, u in by_name.items()}
        for by_name in held
    ]


def random(cluster, count):
    return cluster.random(count)


def adtopk(density=0.05, **options):
    return tw.ADTopK(density=density, dense_fallback=False, **options)


@pytest.mark.parametrize("values", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("density", [0.02, 0.3])
def test_rows_in_registers(kernels, values, density):
    compare(kernels, adtopk(density, values=values), random)


@pytest.mark.parametrize("world", [1, 3])
def test_worlds(kernels, world):
    compare(kernels, adtopk(indices="int32"), random, world=world)


@pytest.mark.parametrize("method", [tw.ADTopK, tw.TopK], ids=["rows", "tensors"])
def test_packed_indices(kernels, method):
    """As many bits as a row needs: none for one element, fields that span two words, slots of different widths."""
    kernels.tune(few_columns_elements=20_000)
    shapes = {**SHAPES, "single": (9, 1), "long": (1, 45_000), "tensor": (3, 18_001)}
    packed = method(density=0.05, dense_fallback=False, indices="packed")
    compare(kernels, packed, random, shapes=shapes, steps=2, world=3)
    columns = {"few": (300, 3), "cube": (30, 2, 8), "long": (1500, 8), "longer": (3000, 8)}
    strided = tw.ADTopK(density=0.1, axis=0, dense_fallback=False, indices="packed")
    compare(kernels, strided, random, shapes=columns, steps=2)


def tables_of(cluster):
    """Those of the one group of the first rank."""
    (made,) = kernels_of(cluster)
    return made.tables


def test_dense_rows_of_all_shapes_are_one_launch(kernels):
    """Of one warp and of four, aligned and not, as many of each as fill no block; long ones have blocks of their own."""
    shapes = {"a": (5, 64), "b": (3, 521), "c": (7, 1028), "d": (2, 2304), "e": (1, 4608)}
    (cluster, _) = compare(kernels, adtopk(0.5), random, shapes=shapes, steps=2)
    (launch,) = tables_of(cluster).register_rows
    assert launch.warps == 4
    # The first has so few elements that they are candidates all.
    assert (
        read_column(RowBlock, launch.blocks, "rows").sum()
        == sum(rows for rows, _ in shapes.values()) - 5
    )
    longer = {"f": (2, 9000), "g": (3, 20_480)}
    compare(kernels, adtopk(0.3), random, shapes=longer, steps=2, world=1)


def test_everything_kept(kernels):
    compare(kernels, adtopk(1.0), random)
    columns = {"columns": (33, 8), "long columns": (1300, 8)}
    compare(kernels, adtopk(1.0, axis=0), random, shapes=columns, steps=2)


def test_strided_rows(kernels):
    shapes = {"few": (300, 3), "many": (70, 19), "cube": (40, 2, 9)}
    compare(kernels, adtopk(0.1, axis=0), random, shapes=shapes)


def test_neighbouring_columns(kernels):
    shapes = {"short": (50, 16), "cube": (30, 2, 8), "long": (1500, 8), "longer": (3000, 8)}
    compare(kernels, adtopk(0.1, axis=0), random, shapes=shapes, steps=2)


def test_rows_beyond_registers(kernels):
    compare(kernels, adtopk(0.01), random, shapes={"long": (2, 45_000), "short": (3, 50)}, steps=2)


def of_kind(kind, cluster, count):
    """Gradients in which `tensor` has many equal magnitudes, is constant, or has few entries."""
    made = cluster.random(count)
    change = {
        "random": lambda g: g,
        "ties": lambda g: (g * 2).round() / 2,
        "constant": lambda g: torch.full_like(g, 0.5),
        "few": lambda g: torch.where(g > 3.2, g, 0.0),
    }[kind]
    return [{**by_name, "tensor": change(by_name["tensor"])} for by_name in made]


@pytest.mark.parametrize("kind", ["random", "ties", "constant", "few"])
@pytest.mark.parametrize("keep", [0.01, 0.4])
def test_multi_block_rows(kernels, kind, keep):
    kernels.tune(few_columns_elements=20_000)
    gradients = partial(of_kind, kind)
    method = tw.TopK(density=keep, dense_fallback=False)
    shapes = {"tensor": (3, 18_001), "small": (5, 50)}
    compare(kernels, method, gradients, shapes=shapes, steps=2)


def adversarial(kind, *, tiny, huge):
    """Gradients of one kind; `tiny` (by step) and `huge` are what random ones are multiplied with."""
    changes = {
        "ties": lambda g, count: (g * 2).round() / 2,
        "zeros": lambda g, count: torch.where(g > 1.5, g, 0.0),
        "constant": lambda g, count: torch.full_like(g, -0.25),
        "tiny": lambda g, count: g * tiny(count),
        "huge": lambda g, count: g * huge,
    }

    def gradients(cluster, count):
        return [
            {name: changes[kind](g, count) for name, g in by_name.items()}
            for by_name in cluster.random(count)
        ]

    return gradients


@pytest.mark.parametrize("axis", ["auto", 0])
@pytest.mark.parametrize("kind", ["ties", "zeros", "constant", "tiny", "huge"])
def test_adversarial_values(kernels, kind, axis):
    shapes = {"row": (3, 128), "odd": (4, 131)}
    if axis == 0:
        shapes = {"columns": (40, 8), "long columns": (1400, 8), "odd": (40, 11)}
    gradients = adversarial(kind, tiny=lambda count: 1e-41, huge=2e37)
    compare(kernels, adtopk(0.1, axis=axis, values="fp16"), gradients, shapes=shapes)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_gradient(kernels, value):
    def gradients(cluster, count):
        made = cluster.random(count)
        if count == 1:
            made[1]["odd"][2, 5] = value
        return made

    compare(kernels, adtopk(), gradients)


def test_slots_without_a_gradient(kernels):
    def gradients(cluster, count):
        made = cluster.random(count)
        for rank, by_name in enumerate(made):
            if count == 1 or rank == 0:
                by_name["row"].zero_()
        return made

    compare(kernels, adtopk(), gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients(kernels, dtype):
    compare(kernels, adtopk(), random, dtype=dtype)


def test_changing_scale(kernels):
    current = torch.tensor(1024.0)

    def scaled(cluster, count):
        current.fill_([1024.0, 2048.0, 512.0][count])
        return cluster.random(count)

    compare(kernels, adtopk(), scaled, scale=lambda: current)


def test_discarded_steps_give_everything_back(kernels):
    cluster = Cluster(2, adtopk(), shapes=SHAPES)
    gradients = cluster.random(0)
    cluster.step(gradients)
    for reducer in cluster.reducers:
        reducer.settle(discard=True)
    for rank in range(2):
        held = cluster.residuals(rank)
        for name, gradient in gradients[rank].items():
            assert torch.equal(held[name], gradient)


# -- momentum correction -------------------------------------------------------------------------------------------


def correction(nesterov=False, masking=True):
    return tw.memory.MomentumCorrection(0.9, nesterov, masking)


def dgc(density=0.05, *, nesterov=False, masking=True, **options):
    memory = correction(nesterov, masking)
    return tw.DGC(density=density, memory=memory, dense_fallback=False, **options)


def corrected_rows(density=0.05, *, nesterov=False, masking=True, **options):
    return adtopk(density, memory=correction(nesterov, masking), **options)


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_of_rows_in_registers(kernels, nesterov, masking):
    compare(kernels, corrected_rows(nesterov=nesterov, masking=masking), random, steps=4)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_of_columns_and_tiles(kernels, nesterov):
    columns = {"short": (50, 16), "long": (1500, 8), "many": (70, 19)}
    method = corrected_rows(0.1, nesterov=nesterov, axis=0)
    compare(kernels, method, random, shapes=columns, steps=2)
    row = {"long": (2, 45_000), "short": (3, 50)}
    compare(kernels, corrected_rows(0.01, nesterov=nesterov), random, shapes=row, steps=2)


@pytest.mark.parametrize("kind", ["random", "ties", "constant"])
def test_momentum_of_multi_block_rows(kernels, kind):
    kernels.tune(few_columns_elements=20_000)
    gradients = partial(of_kind, kind)
    shapes = {"tensor": (3, 18_001), "even": (4, 9000), "small": (5, 50)}
    compare(kernels, dgc(0.01, nesterov=True), gradients, shapes=shapes, steps=2)


@pytest.mark.parametrize("kind", ["ties", "zeros", "constant", "tiny", "huge"])
def test_momentum_of_adversarial_values(kernels, kind):
    """Tiny values become 0 in fp16: nothing was sent there, so that nothing is masked."""

    shapes = {"row": (3, 128), "odd": (4, 131)}
    gradients = adversarial(kind, tiny=lambda count: 1e-41 if count else 3e-8, huge=2e36)
    compare(kernels, corrected_rows(0.1, values="fp16"), gradients, shapes=shapes)


def test_momentum_that_overflows_does_not_stay(kernels):
    def gradients(cluster, count):
        made = cluster.random(count)
        if count < 2:
            made[0]["odd"][2, 5] = 3e38
        return made

    for masking in (True, False):
        clusters = compare(kernels, corrected_rows(masking=masking), gradients, steps=4)
        assert all(torch.isfinite(u).all() for u in momenta(clusters[0])[0].values())
        assert torch.isfinite(clusters[0].step(clusters[0].random(9))[0]["odd"]).all()


def test_momentum_that_overflows_in_more_places_than_are_sent(kernels):
    def gradients(cluster, count):
        made = cluster.random(count)
        if count < 2:
            made[0]["odd"][:] = 3e38
        return made

    for masking in (True, False):
        clusters = compare(kernels, corrected_rows(masking=masking), gradients, steps=5)
        assert all(torch.isfinite(u).all() for u in momenta(clusters[0])[0].values())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("masking", [True, False])
def test_momentum_after_a_bad_gradient(kernels, value, masking):
    def gradients(cluster, count):
        made = cluster.random(count)
        if count == 1:
            made[1]["odd"][2, 5] = made[1]["row"][1, 9] = value
        return made

    compare(kernels, corrected_rows(masking=masking), gradients, steps=4)


def test_momentum_of_slots_without_a_gradient(kernels):
    """Nobody's gradient but everybody's momentum: what would have been sent and masked returns."""

    def gradients(cluster, count):
        made = cluster.random(count)
        for rank, by_name in enumerate(made):
            if count in (1, 2) or rank == 0:
                by_name["row"].zero_()
        return made

    compare(kernels, corrected_rows(), gradients, steps=4, discard=(2,))


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_of_discarded_steps(kernels, nesterov):
    method = dgc(nesterov=nesterov, values="fp32")
    cluster = Cluster(2, method, shapes=SHAPES)
    gradients = cluster.random(0)
    cluster.step(gradients)
    for reducer in cluster.reducers:
        reducer.settle(discard=True)
    for rank in range(2):
        for name, gradient in gradients[rank].items():
            assert torch.equal(momenta(cluster)[rank][name], gradient)
    compare(kernels, method, random, discard=(1, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_momentum_of_narrow_gradients(kernels, dtype):
    compare(kernels, corrected_rows(nesterov=True), random, dtype=dtype, discard=(1,))


def test_momentum_under_a_changing_scale(kernels):
    current = torch.tensor(1024.0)

    def scaled(cluster, count):
        current.fill_([1024.0, 2048.0, 512.0][count])
        return cluster.random(count)

    compare(kernels, dgc(nesterov=True), scaled, scale=lambda: current)


@pytest.mark.parametrize("gradients_of", [random, lambda cluster, count: spoiled(cluster, count)])
def test_small_dense_tensors_travel_beside_the_payload(kernels, gradients_of):
    """Sums in rank order on both sides, so that every bit agrees; what is not finite reaches every rank."""
    shapes = {"large": (64, 160), "bias": (64,), "scalar": (), "norm": (7,), "other": (96, 160)}
    method = tw.ADTopK(density=0.05)
    fast, _ = compare(kernels, method, gradients_of, shapes=shapes, world=3)
    assert [kernels.summed for kernels in find_carriers(fast)] == [False]
    sent = fast.reducers[0].tally.parameters["bias"].wire_bytes
    assert sent == pytest.approx(3 * 2 * 4 * 64, rel=0.02), "3 steps, P-1 per float"


def find_carriers(cluster) -> list[FusedTopK]:
    """The kernels that carry dense tensors along on rank 0; there are none for those alone."""
    routes = [route for plan in cluster.reducers[0].plans.values() for route in plan.routes]
    assert not any(isinstance(route, DenseKernelRoute) for route in routes)
    return [kernels for kernels in kernels_of(cluster) if kernels.dense_prefix]


@pytest.mark.parametrize("gradients_of", [random, lambda cluster, count: spoiled(cluster, count)])
def test_larger_dense_tensors_are_summed_by_themselves(kernels, gradients_of):
    shapes = {"large": (64, 160), "bias": (9000,), "norm": (7,)}
    fast, _ = compare(kernels, tw.ADTopK(density=0.05), gradients_of, shapes=shapes, world=3)
    assert [kernels.summed for kernels in find_carriers(fast)] == [True]
    sent = fast.reducers[0].tally.parameters["bias"].wire_bytes
    assert sent == pytest.approx(3 * 2 * 2 / 3 * 4 * 9000, rel=0.02), (
        "3 steps, 2 (P-1) / P per float"
    )


def spoiled(cluster, count):
    gradients = cluster.random(count)
    if count == 1:
        gradients[1]["bias"][3] = torch.inf
    return gradients


def test_what_the_kernels_leave_to_the_parts(kernels):
    for method in (
        dgc(sample_ratio=0.01),
        dgc(clip=tw.memory.Clip(norm=1.0)),
        adtopk(values="int8"),
    ):
        cluster = Cluster(2, method, shapes=SHAPES)
        cluster.step(cluster.random(0))
        accounts = [a for p in cluster.reducers for a in p.record.accounts]
        assert accounts and not any(isinstance(a, KernelAccount) for a in accounts)


@pytest.mark.parametrize("length", [1, 31, 128, 129, 1024, 1280, 1281, 4096, 25_088, 32_768])
def test_a_register_shape_holds_its_row(length):
    warps, elements = register_shape(length)
    assert elements % 4 == 0 and 32 * warps * elements >= length
    smaller = [count for count in ROW_WARP_COUNTS if count < warps]
    assert all(32 * count * 40 < length for count in smaller)


def test_longer_rows_have_no_register_shape():
    assert register_shape(32_769) is None
