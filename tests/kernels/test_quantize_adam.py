"""Quantised sums in Adam's scale by the kernels, run on the CPU: the bits of the torch reference, and as few launches as without."""

from __future__ import annotations

import itertools

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.kernels.comparing import SHAPES, compare_steps, routes_of
from tests.kernels.cpu_compiler import needs_compiler
from tests.lanes import mostly_slow
from thinwire.compress.quantized_kernel_routes import (
    QuantizedKernelAccount,
    RefreshingKernelRoute,
    ScaledKernelRoute,
)
from thinwire.compress.quantized_routes import SumRoute
from thinwire.layout import Bucket
from thinwire.memory.adam import AdamMomentum, AdamSettings
from thinwire.memory.refresh import Refresh

pytestmark = [needs_compiler, pytest.mark.timeout(300)]
ADAM = AdamSettings(0.9, 0.95, 1e-8, 10, 0)
STORES = ("residual", "momentum", "second_moment")
MEMORIES = {
    "frozen": {},
    "limited": {"limit": 0.7},
    "refreshed": {"refresh": Refresh(every=2, bits=32)},
    "refreshed, limited": {"refresh": Refresh(every=2), "limit": 0.7, "floor": 0.01},
}


def scaled(bits, memory="refreshed, limited", *, storage="fp32", **options):
    memory = AdamMomentum(**MEMORIES[memory], storage=storage, adam=ADAM)
    return tw.Quantized(bits=bits, dense_fallback=False, **options).in_scale(memory)


def seed_second_moments(cluster):
    """Sizes that differ by orders of magnitude inside every tensor, and some that are 0."""
    generator = torch.Generator().manual_seed(7)
    for name, info in cluster.infos.items():
        moment = torch.randn(info.shape, generator=generator).mul(3).exp()
        moment.flatten()[::97] = 0.0
        for reducer in cluster.reducers:
            reducer.assignments.write_memory(name, "second_moment", moment.to(cluster.device))


def compare(kernels, method, *, steps=3, world=2, **options):
    compare_steps(
        kernels,
        method,
        ScaledKernelRoute,
        steps=steps,
        world=world,
        prepare=seed_second_moments,
        stores=STORES,
        accepted=not options.get("restorable"),
        rebucketed=True,
        **options,
    )


GRID = mostly_slow(
    itertools.product((1, 2, 4), MEMORIES, (1, 2, 3)),
    lambda case: case in [(1, "refreshed, limited", 3), (2, "frozen", 2), (4, "limited", 1)],
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
    method = scaled(2, storage=storage)
    options = {"change": spoiled, "discard": (2,), "restorable": restorable}
    # Nobody knows what was accepted once memory is packed.
    compare_steps(
        kernels,
        method,
        ScaledKernelRoute,
        steps=4,
        world=2,
        prepare=seed_second_moments,
        stores=STORES,
        accepted=False,
        **options,
    )


def spoiled(count, gradients):
    """A slot without a gradient, and a bad step, in a refresh and in another one."""
    for one in gradients:
        one["long"].zero_()
    if count in (1, 2):
        gradients[0]["row"][1, 5] = torch.inf
        gradients[-1]["odd"].fill_(torch.nan)


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


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
@pytest.mark.parametrize("bits", [1, 2])
def test_what_overflows(kernels, bits, storage):
    """First c, then the momentum in the units of another loss scale, then nothing any more."""
    now = [1.0]

    def change(count, gradients):
        now[0] = 1e20 if count >= 7 else 1.0
        for one in gradients if 1 <= count < 7 else []:
            one["row"].fill_(3e38)
            one["odd"].mul_(1e-42)

    compare_steps(
        kernels,
        scaled(bits, "limited", storage=storage),
        ScaledKernelRoute,
        steps=9,
        world=2,
        prepare=seed_second_moments,
        stores=STORES,
        accepted=False,
        change=change,
        scale=lambda: torch.tensor(now[0]),
    )


@pytest.mark.parametrize("bits", [1, 4])
def test_codes_that_overflow_in_the_scale(kernels, bits):
    """c is finite, and what was sent of it is not: nothing of that returns to memory."""

    def change(count, gradients):
        for one in gradients if count == 1 else []:
            for name, gradient in one.items():
                one[name] = torch.where(gradient.abs() > 1, 3e38 * gradient.sign(), gradient)

    compare_steps(
        kernels,
        scaled(bits, "frozen"),
        ScaledKernelRoute,
        steps=4,
        world=2,
        prepare=seed_second_moments,
        stores=STORES,
        accepted=False,
        change=change,
    )


@pytest.mark.parametrize("memory", ["limited", "refreshed, limited"])
@pytest.mark.parametrize("world", [2, 3])
def test_loss_scales(kernels, memory, world):
    now = [1.0]

    def change(count, gradients):
        now[0] = (2.0, 2.0, 0.3, 8.0)[count]

    scale = {"scale": lambda: torch.tensor(now[0]), "change": change}
    compare(kernels, scaled(2, memory), steps=4, world=world, **scale)


def test_gradients_that_are_infinite_in_plain_units(kernels):
    """Of one rank in a refresh, under a loss scale below 1."""

    def change(count, gradients):
        if count in (1, 2):
            gradients[0]["long"].view(-1)[77] = 1e38

    scale = {"scale": lambda: torch.tensor(0.1), "change": change}
    compare(kernels, scaled(2, "refreshed"), steps=4, world=2, **scale)


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


def first_bucket(cluster):
    """Rank 0 begins a step, and nobody answers."""
    gradients = cluster.random(0)
    layout = cluster.layouts_of(list(SHAPES))[0]
    flat = torch.zeros(layout.numel)
    for slot in layout.slots:
        slot.view(flat).copy_(gradients[0][slot.name])
    cluster.reducers[0].reduce(Bucket(layout, flat))


@pytest.mark.parametrize("memory", ["frozen", "refreshed"])
def test_a_broken_exchange_returns_all(kernels, memory):
    """Before anything was sent, where the mean gradient comes first."""
    found = []
    for on in (True, False):
        kernels(on)
        cluster = Cluster(2, scaled(2, memory), shapes=SHAPES)
        seed_second_moments(cluster)
        first_bucket(cluster)
        accounts = cluster.reducers[0].record.accounts
        assert any(isinstance(account, QuantizedKernelAccount) for account in accounts) == on
        cluster.reducers[0].settle(discard=True)
        found.append([cluster.reducers[0].assignments.held("long", store) for store in STORES])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    assert found[0][0].any()


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
