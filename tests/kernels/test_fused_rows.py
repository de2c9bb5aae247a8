"""Rows of which few elements are sent: candidates by the last step's cut, chosen by rank, bits as those of the parts."""

from __future__ import annotations

import math

import pytest
import torch

from tests.gradients import slot_of
from tests.kernels.cpu_compiler import needs_compiler
from tests.kernels.test_fused import adtopk, compare, corrected_rows, random, tables_of
from thinwire.kernels.cuda.rows import aim_of
from thinwire.layout import SlotRows

pytestmark = [needs_compiler, pytest.mark.timeout(300)]

LENGTHS = {
    "one": (3, 1),
    "few": (5, 36),
    "odd": (3, 131),
    "quads": (9, 256),
    "row": (5, 1024),
    "more": (2, 1028),
    "two parts": (3, 1281),
    "long": (2, 4608),
    "longest": (2, 9001),
}


def test_all_lengths(kernels):
    (cluster, _) = compare(kernels, adtopk(0.02), random, shapes=LENGTHS, steps=6)
    made = tables_of(cluster)
    assert not made.register_rows
    assert len(made.streamed_rows.rows) == sum(count for count, _ in LENGTHS.values())


@pytest.mark.parametrize("first", ["a", "b", "c"])
def test_rows_behind_a_tensor_of_an_odd_size(kernels, first):
    """Those of a bucket may begin anywhere, those of memory do not."""
    odd = {"a": (1, 1), "b": (1, 2), "c": (1, 131)}[first]
    shapes = {"z": (3, 1024), "y": (2, 1300), "first": odd}
    for order in (shapes, dict(reversed(shapes.items()))):
        compare(kernels, adtopk(0.02), random, shapes=order, steps=4)


def test_magnitudes_that_rise_and_fall(kernels):
    """Too many candidates, then too few, then none at all."""
    scales = (1.0, 1.0, 50.0, 1.0, 0.0, 1e-30, 1.0, 1.0)

    def gradients(cluster, count):
        made = cluster.random(count)
        for by_name in made:
            for gradient in by_name.values():
                gradient.mul_(scales[count])
        return made

    compare(kernels, adtopk(0.02), gradients, shapes=LENGTHS, steps=len(scales), world=1)


def test_ties_among_candidates(kernels):
    """A few magnitudes that occur often: the lowest indices are taken, of one warp's candidates and of several."""

    def gradients(cluster, count):
        made = cluster.random(count)
        for by_name in made:
            for gradient in by_name.values():
                torch.round(gradient * 2, out=gradient).mul_(1 + count)
        return made

    compare(kernels, adtopk(0.02), gradients, shapes=LENGTHS, steps=5, world=1)


def test_all_candidates_in_one_warp(kernels):
    """More than it lists, while those of the other warps would fit."""

    def gradients(cluster, count):
        made = cluster.random(count)
        if count > 1:
            for by_name in made:
                for gradient in by_name.values():
                    gradient[:, : gradient.shape[1] // 8].mul_(40)
        return made

    compare(kernels, adtopk(0.04), gradients, shapes={"a": (2, 9000)}, steps=5, world=1)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite(kernels, value):
    def gradients(cluster, count):
        made = cluster.random(count)
        if count == 2:
            made[0]["row"][1, 700] = value
            made[0]["odd"][2, 130] = value
            made[0]["long"][0, 4000] = -value
        return made

    compare(kernels, adtopk(0.02), gradients, shapes=LENGTHS, steps=5)


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum(kernels, nesterov, masking):
    method = corrected_rows(0.02, nesterov=nesterov, masking=masking)
    compare(kernels, method, random, shapes=LENGTHS, steps=4, world=1)


def rows_of(length: int, keep: int) -> SlotRows:
    return SlotRows(slot_of("a", (1, length)), (1,), (length,), length, 1, keep, "rows")


def test_no_aim_where_there_is_no_room():
    assert aim_of(rows_of(1024, 10)) == 20
    assert aim_of(rows_of(1024, 300)) == 0
    assert aim_of(rows_of(4096, 300)) > 300
