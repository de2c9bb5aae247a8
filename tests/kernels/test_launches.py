"""Few launches per bucket: what shares one gives the bits that it gives apart."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster, kernels_of
from tests.kernels.cpu_compiler import needs_compiler
from tests.kernels.test_fused import adtopk, compare, find_carriers, random
from thinwire.kernels.cuda.decode_parts import COLUMNS, PIECE, TILES, decode_parts
from thinwire.kernels.cuda.fused_topk import MOST_RECORDS

pytestmark = [needs_compiler, pytest.mark.timeout(300)]
SHAPES = {
    "a": (40, 160),
    "bias a": (3,),
    "norm a": (16,),
    "b": (60, 140),
    "bias b": (5,),
    "c": (2, 4300),
    "unused": (4, 64),
}
DENSE = [tw.rule("bias *", method=tw.Dense()), tw.rule("norm *", method=tw.Dense())]
BUCKETS = [["a", "bias a", "norm a"], ["b", "bias b"], ["c", "unused"]]


def launches_per_rank(cluster, launched):
    """Of a step that is not the first."""
    for count in range(2):
        launched.clear()
        cluster.step(cluster.random(count))
    return {name: times / cluster.world for name, times in Counter(launched).items()}


def test_launches_of_a_step_in_several_buckets(launched):
    cluster = Cluster(2, adtopk(0.1), shapes=SHAPES, policy=DENSE)
    cluster.buckets = BUCKETS
    assert launches_per_rank(cluster, launched) == {
        "open_payload": 3,
        "stream_rows": 3,
        "decode": 3,
        "poison": 3,
        "give_back_all": 1,
    }


@pytest.mark.parametrize("world", [2, 5])
def test_several_buckets_with_dense_tensors_and_bad_steps(kernels, world):
    """A bad bucket takes the others' entries back too; a slot that nobody has a gradient for gets no update."""

    def gradients(cluster, count):
        made = cluster.random(count)
        for by_name in made:
            if count != 2:
                by_name["unused"].zero_()
        if count == 1:
            made[1]["bias b"][2] = math.nan
        if count == 3:
            made[0]["c"][1, 4299] = math.inf
        return made

    options = {"shapes": SHAPES, "buckets": BUCKETS, "policy": DENSE, "discard": (4,)}
    fast, slow = compare(kernels, adtopk(0.1), gradients, steps=6, world=world, **options)
    assert [carrier.summed for carrier in find_carriers(fast)] == [False, False]
    for left, right in zip(fast.reducers, slow.reducers, strict=True):
        assert left.tally.parameters == right.tally.parameters


def test_what_nobody_had_a_gradient_for_is_no_loss_before_the_step_is_settled(kernels):
    cluster = Cluster(2, adtopk(), shapes=SHAPES)
    before = cluster.random(0)
    cluster.step(before)
    held = [cluster.residuals(rank) for rank in range(2)]
    gradients = cluster.random(1)
    for by_name in gradients:
        by_name["unused"].zero_()
    cluster.step(gradients)
    for rank in range(2):
        sent = cluster.accepted(rank)
        assert not sent["unused"].any() and sent["a"].any()
        for store in cluster.reducers[rank].assignments.memories():
            (binding,) = store.stores["residual"]._bindings.values()
            for slot in binding.group.slots:
                now = slot.view(binding.flat) + sent[slot.name]
                assert torch.equal(now, held[rank][slot.name] + gradients[rank][slot.name])


def test_dense_tensors_are_carried_with_sums_in_rank_order_too(kernels):
    shapes = {"large": (64, 160), "bias": (9000,)}
    fast, _ = compare(
        kernels, tw.ADTopK(density=0.05), random, shapes=shapes, world=3, deterministic=True
    )
    assert [made.summed for made in find_carriers(fast)] == [True]


def test_dense_tensors_of_a_bucket_with_two_methods_travel_by_themselves(kernels):
    rules = [tw.rule("b", method=adtopk(0.2)), *DENSE]
    cluster = Cluster(2, adtopk(0.1), shapes=SHAPES, policy=rules)
    updates = cluster.step(cluster.random(0))
    assert [made.dense_prefix for made in kernels_of(cluster)] == [0, 0]
    kernels(False)
    other = Cluster(2, adtopk(0.1), shapes=SHAPES, policy=rules)
    for ours, theirs in zip(updates, other.step(other.random(0)), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES)


LENGTHS = (1, 63, 64, 65, 1024, 1025, 2048, 2051, 4096, 4100, 8192, 8193, 20_000)


@pytest.mark.parametrize(("world", "density"), [(2, 0.002), (5, 0.02), (1, 0.3)])
def test_rows_of_all_lengths_are_decoded_in_one_launch(kernels, world, density):
    """Whole teams of threads and those that are left over, one row per piece and several."""
    shapes = {f"rows of {length}": (1 + length % 7, length) for length in LENGTHS}
    compare(kernels, adtopk(density), random, shapes=shapes, steps=2, world=world)
    columns = {"few": (2100, 3), "many": (1030, 19), "whole": (1024, 16), "short": (7, 8)}
    columns["bisected"] = (5121, 9)
    compare(kernels, adtopk(density, axis=0), random, shapes=columns, steps=2, world=world)


def test_every_element_of_every_row_has_one_block(kernels):
    shapes = {f"{length}": (1 + length % 11, length) for length in LENGTHS}
    shapes |= {"columns": (2100, 13)}
    cluster = Cluster(
        1, adtopk(), shapes=shapes, policy=[tw.rule("columns", method=adtopk(axis=0))]
    )
    cluster.step(cluster.random(0))
    for made in kernels_of(cluster):
        slots = made.codec.table.rows
        lengths = [rows.length for rows in slots for _ in range(rows.count)]
        seen = [0] * len(lengths)
        table = made.tables.all_rows
        parts = decode_parts(slots, table, 0)[1:]
        fields = parts[:, table.shape[1] :].tolist()
        for row, (kind, first, count, start, here, _) in zip(parts, fields, strict=True):
            assert torch.equal(row[: table.shape[1]], table[first])
            assert here * (COLUMNS if kind == TILES else count) <= PIECE
            for number in range(first, first + count):
                assert seen[number] == start, "pieces of a row in order"
                seen[number] = start + here
        assert seen == lengths


@pytest.mark.parametrize("shape", [(6, 64), (3, 900), (2, 3000), (1, 9000), (1000, 8)])
def test_an_index_outside_its_row_marks_the_step_as_bad(kernels, shape):
    axis = 0 if shape[1] == 8 else 1
    cluster = Cluster(1, adtopk(0.01, indices="int32", axis=axis), shapes={"w": shape})
    cluster.step(cluster.random(0))
    (made,) = kernels_of(cluster)
    bucket = torch.randn(shape[0] * shape[1])
    sent = made.encode(bucket.clone(), *2 * [torch.zeros(bucket.numel())], None)
    made.decode(sent[None], bucket)
    assert not made.wrong
    indices = made.payload(sent)[made.codec.indices_at :].view(torch.int32)
    indices[made.codec.table.entries - 1] = shape[axis]
    made.decode(sent[None], bucket)
    assert made.wrong


def test_more_buckets_than_one_launch_takes_back(launched):
    shapes = {f"w{number}": (2, 24) for number in range(MOST_RECORDS + 3)}
    cluster = Cluster(1, adtopk(), shapes=shapes)
    cluster.buckets = [[name] for name in shapes]
    gradients = cluster.random(0)
    cluster.step(gradients)
    cluster.reducers[0].settle(discard=True)
    assert launched.count("give_back_all") == 2
    held = cluster.residuals(0)
    assert all(torch.equal(held[name], gradient) for name, gradient in gradients[0].items())
