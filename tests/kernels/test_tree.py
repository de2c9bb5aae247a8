"""Merges of lists by kernels, run on the CPU: the bits of the torch reference."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.kernels.comparing import SHAPES, check_broken_exchange, compare_steps, routes_of
from tests.kernels.cpu_compiler import needs_compiler
from tests.kernels.test_split import LARGE, lonely, unused, wrong
from tests.lanes import slow
from thinwire.compress.picked_routes import PickedRoute
from thinwire.compress.tree_routes import TreeAccount, TreeRoute
from thinwire.kernels.cuda import tree
from thinwire.kernels.cuda.messages import in_words

pytestmark = [needs_compiler, pytest.mark.timeout(300)]


def gtopk(density=0.05, **options):
    return tw.GTopK(density=density, dense_fallback=False, **options)


def compare(kernels, method, *, steps=3, world=3, **options):
    accepted = not options.pop("packed", False) and not options.get("restorable")
    compare_steps(
        kernels, method, TreeRoute, steps=steps, world=world, accepted=accepted, **options
    )


@pytest.mark.parametrize(
    ("world", "values", "conserve"),
    [
        (2, "fp32", False),
        (3, "bf16", True),
        (4, "fp32", True),
        slow(4, "bf16", False),
        slow(5, "fp16", False),
        slow(6, "fp32", True),
        slow(7, "bf16", True),
        slow(8, "fp32", False),
        slow(9, "fp32", True),
    ],
)
def test_bits(kernels, world, values, conserve):
    compare(kernels, gtopk(values=values, conserve=conserve), world=world, rebucketed=True)


@pytest.mark.parametrize(("values", "density"), [("fp32", 0.1), slow("bf16", 0.01)])
def test_many_pieces_of_lists(kernels, values, density):
    method = tw.GTopK(density=density, values=values, conserve=True)
    compare(kernels, method, world=2, steps=2, shapes=LARGE)


@pytest.mark.parametrize(
    ("values", "conserve", "restorable"),
    [("fp32", True, False), ("fp16", False, False), slow("bf16", True, False), slow("fp32", False, True)],
)  # fmt: skip
def test_zeros_ties_cancelled_sums_and_what_is_not_finite(kernels, values, conserve, restorable):
    compare(
        kernels, gtopk(values=values, conserve=conserve), change=wrong, steps=5, world=2,
        discard=(3,), restorable=restorable,
    )  # fmt: skip


@pytest.mark.parametrize(("values", "conserve"), [("bf16", True), slow("fp32", False)])
def test_slots_without_a_gradient_and_discarded_steps(kernels, values, conserve):
    method = gtopk(values=values, conserve=conserve)
    compare(kernels, method, change=unused, steps=4, discard=(0, 2))


@pytest.mark.parametrize("world", [2, slow(5)])
def test_slots_that_one_rank_has_a_gradient_for(kernels, world):
    compare(kernels, gtopk(conserve=True), change=lonely, world=world)


@pytest.mark.parametrize(
    ("dtype", "values"), [(torch.bfloat16, "bf16"), slow(torch.float16, "fp32")]
)
def test_narrow_gradients(kernels, dtype, values):
    compare(kernels, gtopk(values=values, conserve=True), dtype=dtype, discard=(1,))


@pytest.mark.parametrize(("storage", "values"), [("bf16", "bf16"), slow("int8", "fp32")])
def test_narrow_memories(kernels, storage, values):
    memory = tw.memory.Residual(storage=storage)
    method = gtopk(memory=memory, values=values, conserve=True)
    compare(kernels, method, packed=True, change=unused)


def test_a_broken_exchange_returns_all(kernels):
    check_broken_exchange(gtopk(values="bf16"), TreeAccount)


def tree_kernels(cluster):
    (route,) = (route for route in routes_of(cluster) if isinstance(route, TreeRoute))
    return route.tree


@pytest.mark.parametrize("wrong_indices", [[-7, 5], [1 << 29, -1], [3, 3], [5, 3], [-1, 3]])
def test_a_damaged_list_is_no_number(kernels, wrong_indices):
    """An index below its slot's or behind it, one that is there twice or falls, and a hole: nothing of it is kept."""
    cluster = Cluster(2, gtopk(conserve=True), shapes=SHAPES)
    cluster.step(cluster.random(0))
    tree = tree_kernels(cluster)
    mine, theirs = (torch.zeros(tree.list_bytes, dtype=torch.uint8) for _ in range(2))
    for one in (mine, theirs):
        one[: 4 * tree.total].view(torch.int32).fill_(-1)
    tree.damaged.zero_()
    tree.merge(mine, theirs, 0, keeps=True)
    assert int(tree.damaged) == 0
    theirs[:8].view(torch.int32).copy_(torch.tensor(wrong_indices))
    merged, _, left = tree.merge(mine, theirs, 0, keeps=True)
    assert int(tree.damaged) == 1
    assert bool(merged[4 * tree.total :].view(torch.float32).isnan().any())
    assert not bool(left.amounts.any())


@pytest.mark.parametrize("shift", [0, 1])
def test_a_list_is_copied_only_where_its_words_lie_askew(kernels, monkeypatch, shift):
    """As lists arrive that have shared a message."""
    copies = []
    monkeypatch.setattr(tree, "in_words", lambda rows: copies.append(in_words(rows)) or copies[-1])
    cluster = Cluster(2, gtopk(), shapes=SHAPES)
    cluster.step(cluster.random(0))
    merging = tree_kernels(cluster)
    lists = torch.zeros(merging.list_bytes + 4, dtype=torch.uint8)
    theirs = lists[shift : shift + merging.list_bytes]
    mine = theirs.clone()
    merging.merge(mine, theirs, 0, keeps=False)
    assert (copies[-1].data_ptr() == theirs.data_ptr()) == (shift == 0)
    assert copies[-1].data_ptr() % 4 == 0 and torch.equal(copies[-1][0], theirs)


def test_launches(launched):
    cluster = Cluster(4, gtopk(), shapes=SHAPES)
    cluster.step(cluster.random(0))
    launched.clear()
    cluster.step(cluster.random(1))
    kinds = Counter(name for name in launched if name.startswith(("split", "tree")))
    assert kinds.pop("split_undo") == 4, "one for the step before"
    merges = {name: kinds.pop(name) for name in ("tree_merge", "split_decide", "tree_emit")}
    assert set(merges.values()) == {8}, "two for every rank"
    assert list(kinds.values()) == [4] * 5, "one of each for every rank"


@pytest.mark.parametrize(
    ("method", "world", "reason"),
    [
        (gtopk(), 1, "nobody to exchange with"),
        (
            tw.ADTopK(density=0.1, axis=0, exchange=tw.exchange.TreeMerge(), dense_fallback=False),
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
