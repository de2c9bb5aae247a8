"""The kernel that draws random places, run on the CPU, draws what torch draws."""

from __future__ import annotations

import torch

import thinwire as tw
from tests.contracts.cluster import Cluster, parameter
from tests.kernels.cpu_compiler import needs_compiler
from thinwire.layout import RowTable
from thinwire.select.random import Drawing, RandomChoice

pytestmark = needs_compiler
CPU = torch.device("cpu")


def test_the_kernel_draws_what_torch_draws(kernels, launched):
    slots, offset = [], 0
    for name, shape in {"a": (50, 20), "b": (7,), "c": (1,), "d": (3331,), "e": (300,)}.items():
        slots.append(parameter(name, shape).slot(offset))
        offset += slots[-1].numel
    for density in (0.01, 0.3, 1.0):
        table = RowTable([RandomChoice(density).rows(slot, None) for slot in slots], offset)
        fast = Drawing(table, 3, CPU)
        kernels(False)
        plain = Drawing(table, 3, CPU)
        for step in range(50):
            steps = [step] * 5 if step % 2 else [step, 2, 3, 9 * step, 1]
            assert torch.equal(fast.draw(steps), plain.draw(steps))
        kernels(True)
    assert "draw" in launched


def test_strata_of_the_longest_tensors(kernels):
    """Products of places and lengths need more than 32 bits."""
    slot = parameter("w", (2**31 - 1,)).slot(0)
    rows = RandomChoice(1e-6).rows(slot, None)
    table = RowTable([rows], slot.numel)
    fast = Drawing(table, 0, CPU)
    kernels(False)
    plain = Drawing(table, 0, CPU)
    for step in range(5):
        places = plain.draw([step])
        assert torch.equal(fast.draw([step]), places) and (places.diff() > 0).all()
        assert int(places[-1]) < slot.numel


def test_steps_are_the_same_with_and_without_kernels(kernels):
    shapes = {"long": (40, 251), "odd": (3, 131), "last": (2, 150)}
    results = []
    for on in (True, False):
        kernels(on)
        cluster = Cluster(3, tw.RandomK(density=0.05, dense_fallback=False), shapes=shapes)
        steps = [cluster.step(cluster.random(count)) for count in range(3)]
        results.append((steps, [cluster.residuals(rank) for rank in range(3)]))
    (ours, kept), (theirs, held) = results
    for mine, other in zip([*ours, kept], [*theirs, held], strict=True):
        for rank in range(3):
            for name in shapes:
                assert torch.equal(mine[rank][name], other[rank][name])
