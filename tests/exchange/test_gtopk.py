from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.exchange.ranks import Ranks, check_step, gradients
from thinwire.errors import UsageError
from thinwire.exchange.requests import Place
from thinwire.exchange.tree import TreeMerge, meetings, spreading
from thinwire.methods.gtopk import GTopK


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """All but the k largest set to zero, ties to the first."""
    kept = torch.zeros_like(values)
    chosen = values.abs().sort(descending=True, stable=True).indices[:k]
    kept[chosen] = values[chosen]
    return kept


@pytest.mark.parametrize("world", [2, 4, 8])
def test_published_form_keeps_what_the_papers_tree_keeps(world):
    """Merges towards rank 0, whose list everybody gets; a rank takes back what it does not find there."""
    n, density = 3000, 0.02
    k = int(n * density)
    ranks = Ranks(TreeMerge(conserve=False), world, [(n,)], density)
    memory = [torch.zeros(n) for _ in range(world)]
    for seed in range(4):
        inputs = gradients("heavy tail", world, n, seed)
        held = [m + g for m, g in zip(memory, inputs, strict=True)]
        chosen = [largest(c, k) for c in held]
        lists, reach = list(chosen), 1
        while reach < world:
            for rank in range(0, world, 2 * reach):
                lists[rank] = largest(lists[rank] + lists[rank + reach], k)
            reach *= 2
        final = lists[0]
        memory = [
            torch.where((s != 0) & (final != 0), 0.0, c) for c, s in zip(held, chosen, strict=True)
        ]
        step = ranks.step(inputs)
        assert torch.equal(step.update, final * (1 / world))
        for ours, theirs in zip(step.after, memory, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("world", range(2, 20))
def test_everybody_meets_everybody_and_one_keeps_what_a_merge_leaves(world):
    places = [Place(rank, world) for rank in range(world)]
    known = [frozenset([rank]) for rank in range(world)]
    for meeting in zip(*map(meetings, places), strict=True):
        assert len({one.name for one in meeting}) == 1
        before, merges = list(known), {}
        for rank, one in enumerate(meeting):
            if one.to is not None:
                assert meeting[one.to].source == rank
            if one.source is not None:
                assert meeting[one.source].to == rank
                assert not before[rank] & before[one.source]
                known[rank] = before[rank] | before[one.source]
                merges.setdefault(known[rank], []).append(one.keeps)
        assert all(sum(keeps) == 1 for keeps in merges.values())
    everybody = frozenset(range(world))
    for place, one in zip(places, known, strict=True):
        last = spreading(place)
        assert (one if last is None or last.source is None else known[last.source]) == everybody


@pytest.mark.parametrize("world", range(1, 10))
def test_conserving_form_loses_nothing(world):
    ranks = Ranks(TreeMerge(conserve=True), world, [(2000,), (30, 20)], 0.02)
    for seed in range(3):
        step = ranks.step(gradients("heavy tail", world, ranks.numel, seed))
        check_step(step, world, exact=False)
        assert int((step.update != 0).sum()) <= ranks.k
        for traffic in step.traffic:
            messages = traffic.payload_bytes / 8 / ranks.k
            assert messages <= world.bit_length() - 1 + (world & (world - 1) > 0)


def test_published_form_loses_mass():
    ranks = Ranks(TreeMerge(conserve=False), 8, [(2000,)], 0.05)
    with pytest.raises(AssertionError):
        for seed in range(5):
            check_step(ranks.step(gradients("normal", 8, 2000, seed)), 8, exact=False)


def test_two_ranks_give_the_top_k_of_the_sum():
    ranks = Ranks(TreeMerge(), 2, [(500,)], 0.1)
    inputs = gradients("normal", 2, 500)
    step = ranks.step(inputs)
    sums = torch.zeros(500)
    for g in inputs:
        chosen = g.abs().topk(50).indices
        sums[chosen] += g[chosen]
    winners = sums.abs().topk(50).indices
    expected = torch.zeros(500)
    expected[winners] = sums[winners] / 2
    assert torch.equal(step.update, expected)


def test_result_does_not_depend_on_the_bucketing():
    whole = Ranks(TreeMerge(), 5, [(900,), (700,)], 0.05, names=("a", "b"))
    parts = [
        Ranks(TreeMerge(), 5, [(n,)], 0.05, names=(name,)) for n, name in ((900, "a"), (700, "b"))
    ]
    inputs = gradients("normal", 5, 1600)
    updates = [
        parts[0].step([g[:900] for g in inputs]).update,
        parts[1].step([g[900:] for g in inputs]).update,
    ]
    assert torch.equal(whole.step(inputs).update, torch.cat(updates))


def test_the_setting_reaches_the_exchange():
    assert GTopK(conserve=True).exchange == TreeMerge(conserve=True)
    assert GTopK().exchange == TreeMerge(conserve=False)


def test_an_exchange_that_conserves_is_kept():
    method = GTopK(exchange=TreeMerge(conserve=True))
    assert method.exchange == TreeMerge(conserve=True) and method.conserve
    assert replace(GTopK(), conserve=True).exchange == TreeMerge(conserve=True)
    with pytest.raises(UsageError, match=r"conserve is True and exchange is TreeMerge"):
        GTopK(conserve=True, exchange=TreeMerge(conserve=False))
