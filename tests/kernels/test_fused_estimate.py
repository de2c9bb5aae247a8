"""The kernels of estimated thresholds, run on the CPU, give the bits of the parts they stand for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster, kernels_of
from tests.kernels.cpu_compiler import needs_compiler
from tests.kernels.test_fused_threshold import (
    SHAPES,
    changed,
    compare,
    compare_overflows,
    random,
)
from tests.select.data import odd_tensors
from thinwire.engine.bucket_plan import backends_of
from thinwire.kernels.cuda.fused_estimate import FusedEstimate, HeldLook
from thinwire.kernels.looks import TorchLook

pytestmark = [needs_compiler, pytest.mark.timeout(300)]

METHODS = {
    "gaussiank": tw.GaussianK,
    "redsync": tw.RedSync,
    "redsync trimmed": lambda **options: tw.RedSync(trimmed=True, **options),
    "sidco": tw.SIDCo,
    "sidco, three stages": lambda **options: tw.SIDCo(stages=3, **options),
    "sidco exponential": lambda **options: tw.SIDCo(distribution="exponential", **options),
    "sidco, one stage": lambda **options: tw.SIDCo(stages=1, **options),
}
IN_TORCH = {
    'SIDCoThreshold with distribution="gamma"': tw.SIDCo(distribution="gamma"),
    "SIDCoThreshold with adapt=True": tw.SIDCo(adapt=True),
    'GaussianThreshold with finish="published"': tw.GaussianK(finish="published"),
}


def method(name, density=0.05, **options):
    return METHODS[name](density=density, dense_fallback=False, **options)


@pytest.mark.parametrize("name", METHODS)
def test_the_kernels_estimate_and_send_as_the_parts_do(kernels, name):
    ours, _ = compare(kernels, method(name), random, steps=4)
    assert any(isinstance(made, FusedEstimate) for made in kernels_of(ours))


@pytest.mark.parametrize("density", [0.0001, 0.3, 1.0])
@pytest.mark.parametrize("name", ["gaussiank", "redsync", "sidco"])
def test_densities(kernels, name, density):
    compare(kernels, method(name, density), random, steps=2)


@pytest.mark.parametrize("world", [1, 3])
def test_worlds_and_codes(kernels, world):
    compare(kernels, method("sidco", values="fp16", indices="packed"), random, steps=2, world=world)


@pytest.mark.parametrize("kind", ["zeros", "constant", "tiny", "huge", "coarse"])
@pytest.mark.parametrize("name", METHODS)
def test_adversarial_values(kernels, name, kind):
    """An estimate that misses, or is not a number, still ends with the promised number of entries."""
    kernels.tune(spare_candidates=0)
    changes = {
        "zeros": lambda g, _: torch.where(g > 3.0, g, 0.0),
        "constant": lambda g, _: torch.full_like(g, -0.25),
        "tiny": lambda g, _: g * 1e-41,
        "huge": lambda g, _: g * 1e37,
        "coarse": lambda g, _: g.round(),
    }
    compare(kernels, method(name), changed(changes[kind], at=range(4)), steps=3)


@pytest.mark.parametrize("value", [0.1, -1 / 3])
@pytest.mark.parametrize("name", METHODS)
def test_equal_magnitudes_that_sums_have_to_round(kernels, name, value):
    equal = changed(lambda g, _: torch.full_like(g, value), at=range(2))
    compare(kernels, method(name), equal, steps=2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["gaussiank", "redsync", "sidco"])
def test_a_bad_gradient_on_one_rank(kernels, name, value):
    def spoil(g, rank):
        if rank == 1:
            g.view(-1)[3] = value
        return g

    compare(kernels, method(name), changed(spoil, at=(1,)), steps=3)


@pytest.mark.parametrize("name", METHODS)
def test_memory_that_overflows_in_more_places_than_are_sent(kernels, name):
    compare_overflows(kernels, method(name))


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_narrow_memory_that_overflows(kernels, storage):
    memory = tw.memory.Residual(storage=storage)
    compare_overflows(kernels, method("gaussiank", memory=memory))


def test_sums_that_overflow_are_seen(kernels):
    def large(g, _):
        g.view(-1)[5] = 2e38
        return g

    compare(kernels, method("sidco"), changed(large, at=range(3)), steps=3)


def test_slots_without_a_gradient(kernels):
    def gradients(cluster, count):
        made = cluster.random(count)
        for rank, by_name in enumerate(made):
            if count == 1 or rank == 0:
                by_name["odd"].zero_()
        return made

    compare(kernels, method("gaussiank"), gradients, steps=3)


def test_narrow_gradients(kernels):
    compare(kernels, method("redsync"), random, steps=3, dtype=torch.bfloat16)


def test_changing_scale(kernels):
    current = torch.tensor(1024.0)

    def scaled(cluster, count):
        current.fill_([1024.0, 2048.0, 512.0][count % 3])
        return cluster.random(count)

    compare(kernels, method("sidco"), scaled, steps=4, scale=lambda: current)


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_narrow_memory(kernels, storage):
    memory = tw.memory.Residual(storage=storage)
    compare(kernels, method("gaussiank", memory=memory), random, steps=3)


def test_discarded_steps_give_everything_back(kernels):
    compare(kernels, method("sidco"), random, steps=4, discard=(1, 2))


@pytest.mark.parametrize("name", IN_TORCH)
def test_what_is_left_to_torch(kernels, name):
    cluster = Cluster(2, replace(IN_TORCH[name], dense_fallback=False), shapes=SHAPES)
    cluster.step(cluster.random(0))
    told = set(backends_of(cluster.reducers[0].routes).values())
    assert told == {f"torch: no kernels know {name}"}


class Asking:
    """An estimate that keeps what it was told, of everything and of what lies beyond some limits."""

    def __init__(self, limits):
        self.limits = limits

    def __call__(self, look):
        self.told = [look.tail(), look.tail(self.limits)]
        wide = torch.stack([self.limits, 2 * self.limits, self.limits - 1], 1)
        self.counts = [look.count(self.limits), look.count(wide)]
        return self.limits


@pytest.mark.parametrize("factor", [1.0, 1e-30, 1e30])
def test_looks_tell_what_torch_tells(kernels, factor):
    ours, _ = compare(kernels, method("sidco"), random, steps=1)
    made = next(k for k in kernels_of(ours) if isinstance(k, FusedEstimate))
    slots = made.group.slots
    c = factor * torch.randn(made.group.numel, generator=torch.Generator().manual_seed(5))
    for slot, odd in zip(slots, (None, *odd_tensors().values()), strict=False):
        if odd is not None:
            slot.span(c)[: odd.numel()] = odd[: slot.numel]
    limits = torch.full((len(slots),), factor, dtype=torch.float64)
    held = torch.zeros(made.codec.nbytes, dtype=torch.uint8)
    bucket, ratio = torch.zeros(sum(slot.numel for slot in slots) + 64), torch.ones(1)
    addresses = {"bucket": bucket, "before": c, "memory": c, "payload": held, "ratio": ratio}
    values = {name: tensor.data_ptr() for name, tensor in addresses.items()}
    made.measure_gradients.start(values)
    asked, plain = Asking(limits), Asking(limits)
    asked(HeldLook(made, values))
    plain(TorchLook([slot.span(c) for slot in slots], made.targets))
    for mine, other in zip(asked.counts, plain.counts, strict=True):
        assert torch.equal(mine.long(), other)
    for mine, other in zip(asked.told, plain.told, strict=True):
        for field in ("count", "smallest", "largest"):
            assert torch.equal(getattr(mine, field), getattr(other, field))
        for field in ("total", "squares"):
            assert torch.allclose(getattr(mine, field), getattr(other, field), rtol=1e-13, atol=0)
        # Positive and negative elements cancel.
        gap = (mine.signed - other.signed).abs()
        assert (gap <= 1e-13 * other.total).all()


def test_shapes_have_more_than_one_chunk():
    assert math.prod(SHAPES["long"]) > 4096
