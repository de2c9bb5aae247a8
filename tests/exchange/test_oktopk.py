"""Ok-Topk: the exact form against a reference that reads like the paper, and the published form with its periods."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.exchange.ranks import Ranks, check_step, gradients
from thinwire.errors import UsageError
from thinwire.exchange import regions, reused, uneven
from thinwire.exchange.regions import HashedRegions
from thinwire.exchange.reused import ReusedThresholds, step_towards
from thinwire.exchange.split import SplitReduce
from thinwire.exchange.uneven import overlap
from thinwire.kernels.topk import row_topk_reference
from thinwire.layout import RowTable
from thinwire.methods.oktopk import OkTopK


def top(values: Tensor, keep: int) -> Tensor:
    return row_topk_reference(values, keep)


def reference(before: list[Tensor], ranks: Ranks) -> Tensor:
    """The dense sum of everybody's local top-k, of which the k largest of each slot are kept."""
    update = torch.zeros_like(before[0])
    for slot in ranks.group.slots:
        keep = ranks.compressors[0].session.selector.rows(slot).entries
        sums = torch.zeros(slot.numel)
        for c in before:
            chosen = top(slot.span(c), keep)
            sums[chosen] += slot.span(c)[chosen]
        winners = top(sums, keep)
        slot.span(update)[winners] = sums[winners]
    return update * (1 / len(before))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("exchange", [SplitReduce(capacity=1.5), ReusedThresholds()])
def test_equals_the_reference_bit_for_bit(world, exchange):
    ranks = Ranks(exchange, world, [(96, 80), (6000,)], 0.05)
    for seed, kind in enumerate(["normal", "heavy tail"]):
        step = ranks.step(gradients(kind, world, ranks.numel, seed))
        if seed == 0 or isinstance(exchange, SplitReduce):
            assert torch.equal(step.update, reference(step.before, ranks))


@pytest.mark.parametrize("kind", ["normal", "heavy tail", "cancelling"])
def test_keeps_exactly_k(kind):
    ranks = Ranks(SplitReduce(capacity=1.5), 4, [(20000,)], 0.05)
    step = ranks.step(gradients(kind, 4, ranks.numel))
    kept = torch.stack([accepted != 0 for accepted in step.accepted]).any(0)
    assert int(kept.sum()) == ranks.k


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_hashed_regions_tile_the_group(world):
    ranks = Ranks(SplitReduce(), world, [(7,), (64, 768), (1000,)])
    rows = [ranks.compressors[0].session.selector.rows(slot) for slot in ranks.group.slots]
    table = RowTable(rows, ranks.group.numel)
    hashed = HashedRegions(table, world, torch.device("cpu"))
    for which, slot in enumerate(ranks.group.slots):
        positions = torch.arange(slot.offset, slot.offset + slot.numel)
        slots = torch.full_like(positions, which)
        box, index = hashed.locate(positions, slots)
        owner = box // len(rows)
        assert torch.equal(box % len(rows), slots)
        assert torch.equal(hashed.positions(owner, index, hashed.lookup(slots)), positions)
        assert len({*zip(owner.tolist(), index.tolist(), strict=True)}) == slot.numel
        start, stop = hashed.edges[which : which + 2]
        assert bool(((index >= start) & (index < stop)).all())


def hot_columns(world: int) -> list[Tensor]:
    """A matrix of 768 = 12 x 64 columns of which every 12th block is hot, as with a few active features."""
    matrix = 1e-3 * torch.randn(world, 128, 768, generator=torch.Generator().manual_seed(0))
    matrix[:, :, :64] += 10 * torch.randn(
        world, 128, 64, generator=torch.Generator().manual_seed(1)
    )
    return [rank.reshape(-1) for rank in matrix]


def overflow(world: int) -> float:
    """Share of the selected entries that found no place at their owner."""
    ranks = Ranks(SplitReduce(), world, [(128, 768)], 0.05)
    step = ranks.step(hot_columns(world))
    sent = sum(int(outcome.sent.sum()) for outcome in step.outcomes)
    return 1 - sent / (world * ranks.k)


def test_hot_columns_do_not_overflow_an_owner():
    assert overflow(4) < 0.2


def test_ties_go_to_the_lowest_index_up_to_the_capacity():
    ranks = Ranks(SplitReduce(capacity=1.5), 4, [(20000,)], 0.05)
    step = ranks.step(gradients("ties", 4, ranks.numel))
    kept = torch.stack([accepted != 0 for accepted in step.accepted]).any(0)
    assert 0.8 * ranks.k < int(kept.sum()) <= ranks.k
    assert int(kept.nonzero().max()) < ranks.k


def test_mutation_block_mod_world_overflows(monkeypatch):
    monkeypatch.setattr(regions, "deal_blocks", lambda name, blocks: torch.arange(blocks))
    with pytest.raises(AssertionError):
        test_hot_columns_do_not_overflow_an_owner()


def test_result_does_not_depend_on_the_bucketing():
    together = Ranks(SplitReduce(), 3, [(40, 50), (3000,)], 0.05, "bf16", names=("a", "b"))
    first = Ranks(SplitReduce(), 3, [(40, 50)], 0.05, "bf16", names=("a",))
    second = Ranks(SplitReduce(), 3, [(3000,)], 0.05, "bf16", names=("b",))
    for seed in range(3):
        inputs = gradients("normal", 3, together.numel, seed)
        whole = together.step(inputs)
        parts = [first.step([g[:2000] for g in inputs]), second.step([g[2000:] for g in inputs])]
        assert torch.equal(whole.update, torch.cat([part.update for part in parts]))
        for rank in range(3):
            assert torch.equal(whole.after[rank], torch.cat([part.after[rank] for part in parts]))


def published(world: int = 4, **settings) -> Ranks:
    return Ranks(ReusedThresholds(**settings), world, [(4096,), (33, 31)], 0.05)


def test_published_thresholds_are_reused_between_exact_steps():
    ranks = published(tau_prime=4, tau=8)
    counts, cuts = [], []
    for seed in range(16):
        step = ranks.step(gradients("normal", 4, ranks.numel, seed))
        check_step(step, 4)
        counts.append(int(step.outcomes[0].sent.sum()))
        sessions = [c.exchange for c in ranks.compressors]
        states = [session.slots["p0.weight"] for session in sessions]
        assert len({(s.global_, s.count, tuple(s.cuts)) for s in states}) == 1
        assert states[0].cuts == sorted(states[0].cuts)
        cuts.append(tuple(states[0].cuts))
    assert all(counts[step] == ranks.k for step in range(0, 16, 4))
    assert len(set(cuts)) == 2


def test_controllers_move_towards_k():
    assert step_towards(0.5, (0.75, 1.25), 1.01) < 1
    assert step_towards(1.0, (0.75, 1.25), 1.01) == 1
    assert step_towards(2.0, (0.75, 1.25), 1.01) > 1


def test_published_state_restores_the_same_future():
    ranks, twin = published(tau_prime=4, tau=8), published(tau_prime=4, tau=8)
    for seed in range(6):
        ranks.step(gradients("normal", 4, ranks.numel, seed))
    names = [slot.name for slot in ranks.group.slots]
    for rank in range(4):
        state = ranks.compressors[rank].state_dict(names)
        twin.compressors[rank].load_state_dict(state)
        twin.residual(rank).copy_(ranks.residual(rank))
    twin.steps = ranks.steps
    for seed in range(6, 12):
        inputs = gradients("normal", 4, ranks.numel, seed)
        assert torch.equal(ranks.step(inputs).update, twin.step(inputs).update)


def test_state_of_another_world_is_found_anew():
    ranks, smaller = published(4), published(3)
    ranks.step(gradients("normal", 4, ranks.numel))
    state = ranks.compressors[0].state_dict([slot.name for slot in ranks.group.slots])
    for compressor in smaller.compressors:
        compressor.load_state_dict(state)
    check_step(smaller.step(gradients("normal", 3, smaller.numel)), 3)


def test_balancing_changes_nothing_but_the_traffic():
    never, always = published(skew=1e9, tau_prime=8), published(skew=1.0, tau_prime=8)
    moved = 0
    for seed in range(4):
        inputs = gradients("one region", 4, never.numel, seed)
        a, b = never.step(inputs), always.step(inputs)
        assert torch.equal(a.update, b.update)
        moved += sum(key[0] == "sparse/balance" for key in b.ledgers[0].rows())
    assert moved


def test_overlaps_tile_both_partitions():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        counts = torch.randint(0, 20, (5,), generator=generator).tolist()
        old = [sum(counts[:r]) for r in range(6)]
        new = [old[-1] * r // 5 for r in range(6)]
        shares = [[overlap(old, i, new, j) for j in range(5)] for i in range(5)]
        assert [sum(row) for row in shares] == counts
        assert [sum(column) for column in zip(*shares, strict=True)] == [
            new[r + 1] - new[r] for r in range(5)
        ]


def test_mutation_search_in_an_unsorted_list(monkeypatch):
    """B1: the intersection by binary search in a list that is in magnitude order finds almost nothing."""

    def search(positions: Tensor, numel: int) -> Tensor:
        shuffled = positions[
            torch.randperm(len(positions), generator=torch.Generator().manual_seed(0))
        ]
        every = torch.arange(numel)
        at = torch.searchsorted(shuffled, every).clamp(max=max(0, len(shuffled) - 1))
        return shuffled[at] == every

    monkeypatch.setattr(reused, "mark", search)
    ranks = published()
    with pytest.raises(AssertionError):
        check_step(ranks.step(gradients("normal", 4, ranks.numel)), 4)


def check_published_step() -> None:
    ranks = published()
    check_step(ranks.step(gradients("normal", 4, ranks.numel)), 4)


def test_mutation_strict_threshold_loses_the_kth_entry(monkeypatch):
    """B3: `>` against the k-th magnitude sends k-1 entries while all k are cleared."""
    real = uneven.send_to_owners

    def send(offer, entries, owner, bad):
        strictly = entries.values.abs() > entries.values.abs().min()
        reply = yield from real(offer, entries.at(strictly), owner[strictly], bad)
        return reply

    check_published_step()
    monkeypatch.setattr(reused, "send_to_owners", send)
    with pytest.raises(AssertionError):
        check_published_step()


def test_mutation_missing_own_part(monkeypatch):
    real = uneven.send_to_owners

    def send(offer, entries, owner, bad):
        foreign = owner != offer.place.rank
        reply = yield from real(offer, entries.at(foreign), owner[foreign], bad)
        return reply

    monkeypatch.setattr(reused, "send_to_owners", send)
    with pytest.raises(AssertionError):
        check_published_step()


def test_settings_are_checked():
    with pytest.raises(UsageError, match="capacity is 3"):
        SplitReduce(capacity=3)
    with pytest.raises(UsageError, match="thresholds is 'fast'"):
        OkTopK(thresholds="fast")
    with pytest.raises(UsageError, match="must be a SplitReduce"):
        OkTopK(exchange=ReusedThresholds())
    for name, value in (
        ("local_band", 1.0),
        ("global_band", (2, 3)),
        ("local_factor", 0.0),
        ("clamp_factor", 0.5),
        ("clamp_times", -1),
        ("skew", -1.0),
    ):
        with pytest.raises(UsageError, match=f"{name} is "):
            ReusedThresholds(**{name: value})
    assert OkTopK().host_sync_free
    assert not OkTopK(thresholds="published").host_sync_free


def test_a_density_that_does_not_pay_goes_dense_with_a_reason():
    slot = Ranks(SplitReduce(), 1, [(64, 64)]).group.slots[0]
    reason = OkTopK(density=0.9).reason_against(slot, 32, 8)
    assert reason is not None
    assert "SplitReduce among 8 workers stops paying" in reason
    assert OkTopK(density=0.01).reason_against(slot, 32, 8) is None
    # A density too small for one entry is raised to one, and the plan says so.
    assert "1 of 4096" in OkTopK(density=1e-9).describe(slot)


@pytest.mark.parametrize(("density", "k"), [(0.01, 200), (0.05, 1000)])
def test_few_entries_are_nearly_the_largest_sums(density, k):
    """Below 2048 entries the histograms are coarse. Every owner fills its share by magnitude all the same."""
    overlaps = []
    for seed in range(4):
        ranks = Ranks(SplitReduce(capacity=1.5), 4, [(20000,)], density)
        assert ranks.k == k
        step = ranks.step(gradients("normal", 4, ranks.numel, seed))
        wanted = set(reference(step.before, ranks).nonzero().view(-1).tolist())
        found = set(step.update.nonzero().view(-1).tolist())
        overlaps.append(len(wanted & found) / k)
    assert min(overlaps) > 0.9, overlaps


def test_an_exchange_that_was_given_is_never_replaced():
    with pytest.raises(UsageError, match=r"exchange is SplitReduce.*must be a ReusedThresholds"):
        OkTopK(thresholds="published", exchange=SplitReduce())
    assert OkTopK(thresholds="published").exchange == ReusedThresholds()
    assert OkTopK(thresholds="published", exchange=ReusedThresholds(tau=8)).exchange.tau == 8
    assert replace(OkTopK(), thresholds="published").exchange == ReusedThresholds()
