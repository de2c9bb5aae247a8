"""Narrow memories under the fused kernels, run on the CPU: the bits of the parts they stand for."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.kernels.cpu_compiler import needs_compiler
from tests.kernels.test_fused import SHAPES, adtopk, compare, random

pytestmark = [needs_compiler, pytest.mark.timeout(300)]
MEMORIES = {
    "residual bf16": tw.memory.Residual(storage="bf16"),
    "residual int8": tw.memory.Residual(storage="int8"),
    "momentum int8": tw.memory.MomentumCorrection(0.9, True, storage="int8"),
}


@pytest.fixture(params=MEMORIES)
def method(request):
    return adtopk(memory=MEMORIES[request.param])


def test_steps(kernels, method):
    compare(kernels, method, random)


def test_a_bad_gradient_and_an_unused_slot(kernels, method):
    def gradients(cluster, count):
        made = cluster.random(count)
        if count == 1:
            made[1]["odd"][2, 5] = torch.nan
        if count == 2:
            for by_name in made:
                by_name["row"].zero_()
        return made

    compare(kernels, method, gradients, steps=4)


def test_narrow_gradients(kernels, method):
    compare(kernels, method, random, dtype=torch.bfloat16)


def test_changing_scale(kernels, method):
    current = torch.tensor(1024.0)

    def scaled(cluster, count):
        current.fill_([1024.0, 2048.0, 512.0][count])
        return cluster.random(count)

    compare(kernels, method, scaled, scale=lambda: current)


def test_a_discarded_step_returns_and_only_codes_are_held(kernels):
    cluster = Cluster(2, adtopk(memory=tw.memory.Residual(storage="int8")), shapes=SHAPES)
    gradients = cluster.random(0)
    cluster.step(gradients)
    for reducer in cluster.reducers:
        assert reducer.dimensions() == {}
        reducer.settle(discard=True)
        assert all(not account.c.numel() for account in reducer.record.accounts)
    for rank in range(2):
        held = cluster.residuals(rank)
        for name, gradient in gradients[rank].items():
            # Packed twice: what was left, and that with what came back.
            assert (held[name] - gradient).norm() <= 0.03 * gradient.norm()
