"""Quantised sums in Adam's scale by the kernels, run on the CPU: the bits of the torch reference, and as few launches as without."""

from __future__ import annotations

import itertools

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.kernels.adam_scale import (
    ADAM,
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
from thinwire.compress.quantized_kernel_routes import (
    QuantizedKernelAccount,
    RefreshingKernelRoute,
    ScaledKernelRoute,
)
from thinwire.compress.quantized_routes import SumRoute
from thinwire.memory.adam import AdamMomentum
from thinwire.memory.refresh import Refresh

pytestmark = [needs_compiler, pytest.mark.timeout(300)]


def scaled(bits, memory="refreshed, limited", *, storage="fp32", **options):
    return in_scale(tw.Quantized(bits=bits, dense_fallback=False, **options), memory, storage)


def compare(kernels, method, **options):
    compare_in_scale(kernels, method, ScaledKernelRoute, **options)


GRID = mostly_slow(
    itertools.product((1, 2, 4), MEMORIES, (1, 2, 3)),
    lambda case: case in [(1, "refreshed, limited", 3), (2, "frozen", 2), (4, "refreshed", 1)],
)


@pytest.mark.parametrize("case", GRID, ids=str)
def test_codes_memories_and_worlds(kernels, case):
    bits, memory, world = case
    compare(kernels, scaled(bits, memory), world=world)


@pytest.mark.parametrize(
    "case",
    mostly_slow(itertools.product((1, 2, 4), ("nearest", "stochastic")), lambda case: case[0] == 1),
    ids=str,
)
def test_roundings(kernels, case):
    bits, rounding = case
    compare(kernels, scaled(bits, rounding=rounding))


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        itertools.product((1, 2, 4), (1, 2, 4, 8, 16), ("frozen", "refreshed, limited")),
        lambda case: case in [(1, 2, "frozen"), (1, 8, "refreshed, limited")],
    ),
    ids=str,
)
def test_sums_with_a_code_of_their_own(kernels, case):
    bits, sum_bits, memory = case
    compare(kernels, scaled(bits, memory, sum_bits=sum_bits))


@pytest.mark.parametrize(
    "case", mostly_slow(itertools.product((1, 4), (64, 256)), lambda case: case == (1, 64)), ids=str
)
def test_blocks(kernels, case):
    bits, block = case
    compare(kernels, scaled(bits, block=block), steps=2)


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        itertools.product((1, 2, 4), (torch.bfloat16, torch.float16)),
        lambda case: case == (1, torch.bfloat16),
    ),
    ids=str,
)
def test_narrow_gradients(kernels, case):
    bits, dtype = case
    compare(kernels, scaled(bits), dtype=dtype)


@pytest.mark.parametrize(
    "case",
    mostly_slow(itertools.product(("bf16", "int8"), (False, True)), lambda case: case[1]),
    ids=str,
)
def test_narrow_memories(kernels, case):
    storage, restorable = case
    options = {"change": spoiled, "discard": (2,), "restorable": restorable}
    compare(kernels, scaled(2, storage=storage), steps=4, told=False, **options)


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        itertools.product((1, 2), ("frozen", "refreshed, limited"), (False, True)),
        lambda case: case[:2] == (1, "refreshed, limited"),
    ),
    ids=str,
)
def test_bad_and_discarded_steps_and_slots_without_a_gradient(kernels, case):
    bits, memory, restorable = case
    options = {"change": spoiled, "discard": (3,), "restorable": restorable}
    compare(kernels, scaled(bits, memory), steps=5, **options)


@pytest.mark.parametrize("case", mostly_slow((False, True), lambda case: case), ids=str)
def test_an_owner_with_a_limit_in_bad_and_discarded_steps(kernels, case):
    options = {"change": spoiled, "discard": (3,), "restorable": case}
    compare(kernels, scaled(1, sum_bits=4), steps=5, world=3, **options)


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
@pytest.mark.parametrize("bits", [1, 2])
def test_what_overflows(kernels, bits, storage):
    compare_overflows(kernels, scaled(bits, "limited", storage=storage), ScaledKernelRoute)


@pytest.mark.parametrize(("bits", "sum_bits"), [(1, 1), (1, 4), (4, 4)])
def test_codes_that_overflow_in_the_scale(kernels, bits, sum_bits):
    """c is finite, and what was sent of it is not: nothing of that returns to memory."""

    def change(count, gradients):
        for one in gradients if count == 1 else []:
            for name, gradient in one.items():
                one[name] = torch.where(gradient.abs() > 1, 3e38 * gradient.sign(), gradient)

    method = scaled(bits, "frozen", sum_bits=sum_bits)
    compare(kernels, method, steps=4, change=change, told=False)


@pytest.mark.parametrize("memory", ["limited", "refreshed, limited"])
@pytest.mark.parametrize("world", [2, 3])
def test_loss_scales(kernels, memory, world):
    compare_loss_scales(kernels, scaled(2, memory), ScaledKernelRoute, world)


def test_gradients_that_are_infinite_in_plain_units(kernels):
    compare_infinite_in_plain_units(kernels, scaled(2, "refreshed"), ScaledKernelRoute)


@pytest.mark.parametrize("bits", [8, 16])
def test_the_mean_of_a_refresh(kernels, bits):
    """By kernels where the method itself is not."""
    memory = AdamMomentum(Refresh(every=1, bits=bits), adam=ADAM)
    method = tw.Quantized(bits=2, block=32, dense_fallback=False).in_scale(memory)
    found = []
    for on in (True, False):
        kernels(on)
        cluster = Cluster(3, method, shapes=SHAPES)
        seed_second_moments(cluster)
        for step in range(3):
            gradients = cluster.random(step)
            spoiled(step, gradients)
            cluster.step(gradients)
            found.append(cluster.held(0, "second_moment"))
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("memory", ["frozen", "refreshed"])
def test_a_broken_exchange_returns_all(kernels, memory):
    check_broken_exchange(kernels, scaled(2, memory), QuantizedKernelAccount)


def test_a_step_takes_as_many_launches_as_without_a_scale(kernels, launched):
    cluster = Cluster(2, scaled(1, "limited"), shapes={"w": (40, 128), "v": (30, 70)})
    seed_second_moments(cluster)
    cluster.step(cluster.random(0))
    launched.clear()
    cluster.step(cluster.random(1))
    names = [name for name in launched if name.startswith("quantize_")]
    parts = ("quantize_open", "quantize_send", "quantize_sum", "quantize_deliver")
    assert sorted(names) == sorted([*parts, "quantize_return"] * 2)


def test_the_plan_says_who_does_the_work(kernels):
    for on in (True, False):
        kernels(on)
        cluster = Cluster(2, scaled(1, "refreshed"), shapes=SHAPES)
        seed_second_moments(cluster)
        for step in range(2):
            cluster.step(cluster.random(step))
        routes = [route for route in routes_of(cluster) if isinstance(route, SumRoute)]
        told = {(route.backend, route.objection) for route in routes}
        if on:
            assert isinstance(routes[0], RefreshingKernelRoute)
            assert isinstance(routes[1], ScaledKernelRoute)
            assert told == {("CUDA kernels", None)}
        else:
            assert told == {("torch", "there are no kernels for cpu")}
