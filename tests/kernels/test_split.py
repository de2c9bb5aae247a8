"""Split-and-reduce by kernels, run on the CPU: the bits of the torch reference."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.kernels.comparing import SHAPES, check_broken_exchange, compare_steps, routes_of
from tests.kernels.cpu_compiler import needs_compiler
from tests.lanes import slow
from thinwire.compress.picked_routes import PickedRoute
from thinwire.compress.split_routes import SplitAccount, SplitRoute
from thinwire.exchange.regions import block_bits, deal_blocks
from thinwire.kernels.cuda.split_tables import SplitSlot
from thinwire.kernels.cuda.structs import read_column

pytestmark = [needs_compiler, pytest.mark.timeout(300)]


def oktopk(density=0.05, **options):
    return tw.OkTopK(density=density, dense_fallback=False, **options)


def compare(kernels, method, *, steps=3, world=3, **options):
    accepted = not options.pop("packed", False) and not options.get("restorable")
    compare_steps(
        kernels, method, SplitRoute, steps=steps, world=world, accepted=accepted, **options
    )


@pytest.mark.parametrize(
    ("world", "values"),
    [(2, "fp32"), (3, "bf16"), slow(4, "fp16"), slow(7, "fp32"), slow(2, "bf16"), slow(3, "fp32")],
)
def test_bits(kernels, world, values):
    compare(kernels, oktopk(values=values), world=world, rebucketed=True)


LARGE = {"matrix": (300, 257), "row": (3, 128), "long": (70_001,), "bias": (17,)}


@pytest.mark.parametrize(("values", "density"), [("fp32", 0.1), slow("bf16", 0.01)])
def test_many_chunks_of_entries_and_ranges_of_sums(kernels, values, density):
    compare(kernels, tw.OkTopK(density=density, values=values), world=2, steps=2, shapes=LARGE)


def crowd(count, gradients):
    """Nearly all that is selected of one slot has the same owner; another slot has nothing but ties."""
    world, numel = len(gradients), gradients[0]["long"].numel()
    bits = block_bits(numel, world)
    hot = deal_blocks("long", -(-numel >> bits)) % world == 1
    hot = hot.repeat_interleave(1 << bits)[:numel]
    for one in gradients:
        one["long"].view(-1).mul_(torch.where(hot, 10.0, 1e-3))
        one["row"].zero_()[:, 3] = 1.0
        one["odd"].fill_(-2.0)


@pytest.mark.parametrize(
    ("world", "values", "capacity"),
    [(4, "bf16", 1.0), slow(2, "fp32", 1.0), slow(3, "fp16", 1.25), slow(3, "fp32", 1.5)],
)
def test_boxes_that_overflow_and_ties(kernels, world, values, capacity):
    exchange = tw.exchange.SplitReduce(capacity=capacity)
    compare(kernels, oktopk(exchange=exchange, values=values), world=world, change=crowd)


def test_the_crowd_overflows(kernels):
    """Otherwise the test above would show nothing."""
    cluster = Cluster(4, oktopk(), shapes=SHAPES)
    gradients = cluster.random(0)
    crowd(0, gradients)
    cluster.step(gradients)
    split = split_kernels(cluster)
    slot = [one.name for one in split.group.slots].index("long")
    starts, room = (
        split.slots[slot : slot + 1],
        int(read_column(SplitSlot, split.slots, "room")[slot]),
    )
    chunk = int(read_column(SplitSlot, starts, "chunk"))
    assert int(split.counts[chunk, :-1].max()) > room


def wrong(count, gradients):
    for rank, one in enumerate(gradients):
        one["row"].zero_()
        one["long"].copy_(torch.where(one["long"] > 0, 1.0, -1.0) * (-1) ** rank)
        one["odd"].mul_(1e-42)
    if count == 1:
        gradients[0]["conv"].view(-1)[3] = torch.inf
        gradients[1]["conv"].view(-1)[7] = torch.nan
    if count >= 2:
        # The sum of what two ranks send overflows, and then that of gradient and memory.
        gradients[1]["long"].view(-1)[5] = 3e38
        gradients[0]["long"].view(-1)[5] = 3e38
        gradients[0]["conv"].fill_(3e38)


@pytest.mark.parametrize("restorable", [False, slow(True)])
@pytest.mark.parametrize("values", ["fp32", "fp16", slow("bf16")])
def test_zeros_ties_cancelled_sums_and_what_is_not_finite(kernels, values, restorable):
    compare(
        kernels, oktopk(values=values), change=wrong, steps=5, world=2, discard=(3,),
        restorable=restorable,
    )  # fmt: skip


def unused(count, gradients):
    for rank, one in enumerate(gradients):
        one["long" if count % 2 else "conv"].zero_()
        if rank:
            one["row"].zero_()


@pytest.mark.parametrize("values", ["fp32", slow("bf16")])
def test_slots_without_a_gradient_and_discarded_steps(kernels, values):
    compare(kernels, oktopk(values=values), change=unused, steps=4, discard=(0, 2))


def lonely(count, gradients):
    for rank, one in enumerate(gradients):
        for number, gradient in enumerate(one.values()):
            if rank != (number + count) % len(gradients):
                gradient.zero_()


@pytest.mark.parametrize("world", [2, slow(5)])
def test_slots_that_one_rank_has_a_gradient_for(kernels, world):
    """Little arrives at their owners, less than there are places."""
    compare(kernels, oktopk(), change=lonely, world=world)


@pytest.mark.parametrize(
    ("dtype", "values"), [(torch.bfloat16, "bf16"), slow(torch.float16, "fp32")]
)
def test_narrow_gradients(kernels, dtype, values):
    compare(kernels, oktopk(values=values), dtype=dtype, discard=(1,))


@pytest.mark.parametrize(("storage", "values"), [("bf16", "bf16"), slow("int8", "fp32")])
def test_narrow_memories(kernels, storage, values):
    method = oktopk(memory=tw.memory.Residual(storage=storage), values=values)
    compare(kernels, method, packed=True, change=unused)


@pytest.mark.slow
def test_loss_scales(kernels):
    scales = iter([2.0] * 3 + [0.5] * 3 + [8.0] * 3 + [2.0] * 3 + [0.5] * 3 + [8.0] * 3)
    compare(kernels, oktopk(), scale=lambda: torch.tensor(next(scales)))


def test_a_broken_exchange_returns_all(kernels):
    check_broken_exchange(oktopk(values="bf16"), SplitAccount)


def split_kernels(cluster):
    (route,) = (route for route in routes_of(cluster) if isinstance(route, SplitRoute))
    return route.split


@pytest.mark.parametrize("wrong_index", [-7, 1 << 30, 0])
def test_a_damaged_message_marks_the_step_at_every_rank(kernels, wrong_index):
    """An index below its slot's, behind it, or that is there twice: the owner's sums then hold something that is no number."""
    cluster = Cluster(2, oktopk(), shapes=SHAPES)
    cluster.step(cluster.random(0))
    split = split_kernels(cluster)
    sent = split.send(torch.zeros(1 << 16, dtype=torch.uint8), torch.zeros(split.group.numel))
    arrived = torch.zeros(2, split.form.row, dtype=torch.uint8)
    indices = arrived[:, split.head : split.head + 4 * split.total].view(torch.int32)
    indices.fill_(-1)
    split.add_up(arrived, sent)
    assert int(split.damaged) == 0
    indices[1, :2] = torch.tensor([wrong_index, wrong_index])
    split.add_up(arrived, sent)
    assert int(split.damaged) == 1
    values = sent.sums[4 * split.total :].view(torch.float32)
    assert bool(values.isnan().any())


def test_small_dense_tensors_travel_with_the_sums(kernels):
    for on in (True, False):
        kernels(on)
        shapes = {"weight": (300, 257), "bias": (17,)}
        cluster = Cluster(3, oktopk(), shapes=shapes)
        cluster.step(cluster.random(0))
        rows = cluster.ranks.drivers[0].ledger.rows()
        kinds = [kind for _, kind in rows]
        assert kinds == ["all_to_all", "all_gather"]


def test_launches(launched):
    cluster = Cluster(3, oktopk(), shapes=SHAPES)
    cluster.step(cluster.random(0))
    launched.clear()
    cluster.step(cluster.random(1))
    kinds = Counter(name for name in launched if name.startswith("split"))
    assert kinds.pop("split_undo") == 3, "one for the step before"
    assert list(kinds.values()) == [3] * 7, "one of each for every rank"


@pytest.mark.parametrize(
    ("method", "world", "reason"),
    [
        (oktopk(), 1, "nobody to exchange with"),
        (oktopk(exchange=tw.exchange.SplitReduce(contribution="full")), 2, "contribution='full'"),
        (
            tw.ADTopK(density=0.1, axis=0, exchange=tw.exchange.SplitReduce(), dense_fallback=False),
            2,
            "in the order in which they lie in memory",
        ),
    ],
)  # fmt: skip
def test_what_the_kernels_cannot_do_is_said(kernels, method, world, reason):
    cluster = Cluster(world, method, shapes=SHAPES)
    cluster.step(cluster.random(0))
    picked = [route for route in routes_of(cluster) if isinstance(route, PickedRoute)]
    assert picked
    assert all(reason in route.objection for route in picked)
