"""Top-k in Adam's scale by the kernels, run on the CPU: the bits of the torch reference in every kind of row."""

from __future__ import annotations

import itertools

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.kernels.adam_scale import (
    MEMORIES,
    check_broken_exchange,
    compare_in_scale,
    compare_infinite_in_plain_units,
    compare_loss_scales,
    compare_overflows,
    in_scale,
    seed_second_moments,
    spoiled,
)
from tests.kernels.comparing import SHAPES, routes_of
from tests.kernels.cpu_compiler import needs_compiler
from tests.lanes import mostly_slow
from thinwire.compress.dense import CarriedRoute
from thinwire.compress.kernel_routes import (
    KernelAccount,
    RefreshingTopKRoute,
    ScaledTopKRoute,
)
from thinwire.compress.sparse import PartsRoute

pytestmark = [needs_compiler, pytest.mark.timeout(300)]
ROWS = {
    "short": (40, 60),
    "odd": (7, 131),
    "wide": (3, 2052),
    "column": (300, 9),
    "kernel": (8, 4, 3, 3),
}
METHODS = {
    "whole": lambda density=0.02, **o: tw.TopK(density=density, **o),
    "rows": lambda density=0.02, **o: tw.ADTopK(density=density, axis=1, **o),
    "columns": lambda density=0.02, **o: tw.ADTopK(density=density, axis=0, **o),
    "momentum": lambda density=0.02, **o: tw.DGC(density=density, **o),
}


def scaled(name="whole", memory="refreshed, limited", *, storage="fp32", **options):
    return in_scale(METHODS[name](dense_fallback=False, **options), memory, storage)


def compare(kernels, method, **options):
    compare_in_scale(kernels, method, ScaledTopKRoute, **options)


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        itertools.product(METHODS, MEMORIES, (1, 2, 3)),
        lambda case: (
            case
            in [
                ("whole", "refreshed, limited", 3),
                ("rows", "limited", 2),
                ("columns", "refreshed, limited", 2),
                ("momentum", "frozen", 1),
            ]
        ),
    ),
    ids=str,
)
def test_selections_memories_and_worlds(kernels, case):
    name, memory, world = case
    compare(kernels, scaled(name, memory), world=world)


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        itertools.product(("rows", "columns"), (0.004, 0.05, 0.3), ("limited", "refreshed")),
        lambda case: case in [("rows", 0.3, "limited"), ("rows", 0.05, "refreshed")],
    ),
    ids=str,
)
def test_rows_of_all_kinds(kernels, case):
    """In registers, streamed and strided, aligned and not."""
    name, density, memory = case
    compare(kernels, scaled(name, memory, density=density), shapes=ROWS, steps=4)


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        itertools.product((0.001, 0.02, 0.2), ("limited", "refreshed, limited")),
        lambda case: case == (0.02, "refreshed, limited"),
    ),
    ids=str,
)
def test_rows_that_many_blocks_share(kernels, case):
    density, memory = case
    shapes = {"tensor": (3, 18_001), "even": (4, 9000), "small": (5, 50)}
    compare(kernels, scaled("whole", memory, density=density), shapes=shapes, steps=4)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("memory", ["limited", "refreshed, limited"])
def test_a_few_long_columns(kernels, memory, shared):
    """Of one block each, or of many."""
    if shared:
        kernels.tune(few_columns_elements=20_000, block_candidates=64)
    shapes = {"tall": (9000, 3), "crowded": (4000, 20)}
    compare(kernels, scaled("columns", memory, density=0.05), shapes=shapes)


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        itertools.product(("fp32", "bf16", "fp16"), ("int32", "packed")),
        lambda case: case in [("bf16", "packed"), ("fp16", "int32")],
    ),
    ids=str,
)
def test_codes(kernels, case):
    values, indices = case
    compare(kernels, scaled("rows", values=values, indices=indices))


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        itertools.product(("whole", "rows", "columns"), (torch.bfloat16, torch.float16)),
        lambda case: case == ("whole", torch.bfloat16),
    ),
    ids=str,
)
def test_narrow_gradients(kernels, case):
    name, dtype = case
    compare(kernels, scaled(name), dtype=dtype)


@pytest.mark.parametrize(
    "case",
    mostly_slow(itertools.product(("bf16", "int8"), (False, True)), lambda case: case[1]),
    ids=str,
)
def test_narrow_memories(kernels, case):
    storage, restorable = case
    options = {"change": spoiled, "discard": (2,), "restorable": restorable}
    compare(kernels, scaled("rows", storage=storage), steps=4, told=False, **options)


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        itertools.product(("whole", "columns"), ("frozen", "refreshed, limited"), (False, True)),
        lambda case: case[:2] == ("whole", "refreshed, limited"),
    ),
    ids=str,
)
def test_bad_and_discarded_steps_and_slots_without_a_gradient(kernels, case):
    name, memory, restorable = case
    options = {"change": spoiled, "discard": (3,), "restorable": restorable}
    compare(kernels, scaled(name, memory), steps=5, **options)


@pytest.mark.parametrize("name", ["whole", "rows", "columns"])
def test_ties_and_zeros(kernels, name):
    """Equal divisors as well as equal gradients, so that weights are equal too."""

    def change(count, gradients):
        for one in gradients:
            one["row"].zero_()
            one["long"].copy_(torch.where(one["long"] > 0, 1.0, -1.0))
            one["conv"].view(-1)[5:].zero_()

    def prepare(cluster):
        for name, info in cluster.infos.items():
            for reducer in cluster.reducers:
                moment = torch.full(info.shape, 4.0)
                reducer.assignments.write_memory(name, "second_moment", moment)

    compare(kernels, scaled(name, "limited"), steps=4, prepare=prepare, change=change)


@pytest.mark.parametrize("name", ["whole", "rows", "columns"])
def test_weights_that_are_infinite(kernels, name):
    """Where the divisor is eps alone: what is sent is finite all the same."""

    def change(count, gradients):
        for one in gradients:
            one["long"].mul_(1e33)

    compare(kernels, scaled(name, "frozen"), change=change)


@pytest.mark.parametrize(("memory", "scaled_at"), [("limited", 7), ("refreshed, limited", 6)])
@pytest.mark.parametrize("name", ["whole", "rows", "columns"])
def test_what_overflows(kernels, name, memory, scaled_at):
    compare_overflows(kernels, scaled(name, memory), ScaledTopKRoute, scaled_at)


@pytest.mark.parametrize("memory", ["limited", "refreshed, limited"])
def test_loss_scales(kernels, memory):
    compare_loss_scales(kernels, scaled("whole", memory), ScaledTopKRoute, world=3)


def test_gradients_that_are_infinite_in_plain_units(kernels):
    compare_infinite_in_plain_units(kernels, scaled("whole", "refreshed"), ScaledTopKRoute)


@pytest.mark.parametrize("memory", ["frozen", "refreshed"])
def test_a_broken_exchange_returns_all(kernels, memory):
    check_broken_exchange(kernels, scaled("whole", memory), KernelAccount)


@pytest.mark.parametrize("memory", ["frozen", "refreshed, limited"])
def test_dense_tensors_travel_along(kernels, memory):
    shapes = {"large": (60, 700), "bias": (17,), "norm": (64,)}
    cluster = Cluster(3, scaled("whole", memory), shapes=shapes)
    seed_second_moments(cluster)
    cluster.step(cluster.random(0))
    assert any(isinstance(route, CarriedRoute) for route in routes_of(cluster))
    compare(kernels, scaled("whole", memory), shapes=shapes, world=3)


def test_a_step_takes_as_many_launches_as_without_a_scale(kernels, launched):
    counts = []
    for method in (tw.TopK(density=0.02, dense_fallback=False), scaled("whole", "limited")):
        cluster = Cluster(2, method, shapes={"w": (40, 128), "v": (30, 70)})
        for name, info in cluster.infos.items() if counts else ():
            for reducer in cluster.reducers:
                reducer.assignments.write_memory(name, "second_moment", torch.ones(info.shape))
        cluster.step(cluster.random(0))
        launched.clear()
        cluster.step(cluster.random(1))
        counts.append(sorted(launched))
    assert counts[0] == counts[1]


def test_the_plan_says_who_does_the_work(kernels):
    for on in (True, False):
        kernels(on)
        cluster = Cluster(2, scaled("whole", "refreshed, limited"), shapes=SHAPES)
        seed_second_moments(cluster)
        for step in range(2):
            cluster.step(cluster.random(step))
        kind = ScaledTopKRoute if on else PartsRoute
        routes = [route for route in routes_of(cluster) if isinstance(route, kind)]
        told = {(route.backend, route.objection) for route in routes}
        if on:
            assert isinstance(routes[0], RefreshingTopKRoute)
            assert not isinstance(routes[1], RefreshingTopKRoute)
            assert told == {("CUDA kernels", None)}
        else:
            assert told == {("torch", "the kernels for exact top-k do not run on cpu")}
