from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.exchange.ranks import Ranks, check_step, gradients
from thinwire.errors import UsageError
from thinwire.exchange.tree import TreeMerge
from thinwire.methods.gtopk import GTopK


@pytest.mark.parametrize("world", [2, 3, 4, 6, 7])
def test_conserving_form_loses_nothing(world):
    ranks = Ranks(TreeMerge(conserve=True), world, [(2000,), (30, 20)], 0.02)
    for seed in range(3):
        step = ranks.step(gradients("heavy tail", world, ranks.numel, seed))
        check_step(step, world, exact=False)
        assert int((step.update != 0).sum()) <= ranks.k


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
