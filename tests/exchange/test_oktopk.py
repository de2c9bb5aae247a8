"""Ok-Topk: the exact form against a reference that reads like the paper, and the published form with its periods."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.exchange.ranks import Ranks, check_step, gradients
from thinwire.errors import UsageError
from thinwire.exchange import regions, reused
from thinwire.exchange.drivers import run_virtual
from thinwire.exchange.lockstep import alone
from thinwire.exchange.regions import HashedRegions
from thinwire.exchange.reused import ReusedThresholds, step_towards
from thinwire.exchange.segments import Edges, Segments
from thinwire.exchange.split import SplitReduce
from thinwire.exchange.threshold import (
    COARSE,
    EXACT,
    MEDIUM,
    Candidates,
    Rounds,
    choose_largest,
    magnitude_bits,
)
from thinwire.exchange.uneven import overlap
from thinwire.kernels.topk import row_topk_reference
from thinwire.methods.oktopk import OkTopK
from thinwire.select.rows import RowTable


def top(values: Tensor, keep: int) -> Tensor:
    return row_topk_reference(values, keep)


def reference(before: list[Tensor], ranks: Ranks) -> Tensor:
    """The dense sum of everybody's local top-k, of which the k largest of each slot are kept."""
    update = torch.zeros_like(before[0])
    for slot in ranks.group.slots:
        keep = ranks.compressors[0].session.rows(slot, None).entries
        sums = torch.zeros(slot.numel)
        for c in before:
            chosen = top(slot.span(c), keep)
            sums[chosen] += slot.span(c)[chosen]
        winners = top(sums, keep)
        slot.span(update)[winners] = sums[winners]
    return update * (1 / len(before))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    "exchange", [SplitReduce(threshold="exact", capacity=1.5), ReusedThresholds()]
)
def test_equals_the_reference_bit_for_bit(world, exchange):
    ranks = Ranks(exchange, world, [(96, 80), (6000,)], 0.05)
    for seed, kind in enumerate(["normal", "heavy tail"]):
        step = ranks.step(gradients(kind, world, ranks.numel, seed))
        if seed == 0 or isinstance(exchange, SplitReduce):
            assert torch.equal(step.update, reference(step.before, ranks))


@pytest.mark.parametrize("kind", ["normal", "heavy tail", "cancelling"])
@pytest.mark.parametrize("threshold", ["auto", "exact"])
def test_keeps_exactly_k(kind, threshold):
    ranks = Ranks(SplitReduce(threshold=threshold, capacity=1.5), 4, [(20000,)], 0.05)
    step = ranks.step(gradients(kind, 4, ranks.numel))
    kept = torch.stack([accepted != 0 for accepted in step.accepted]).any(0)
    assert int(kept.sum()) == ranks.k


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("rounds", [EXACT, (7, 6), (5, 4)])
def test_radix_select_finds_the_largest(world, rounds):
    values = torch.randn(world, 400, generator=torch.Generator().manual_seed(1))
    values[:, ::7] = 0.0
    values[:, 5::11] = 1.25
    present = torch.rand(world, 400, generator=torch.Generator().manual_seed(2)) < 0.8
    for keep in (0, 1, 37, 200, 5000):
        programs = [
            alone(
                choose_largest(
                    Candidates(
                        magnitude_bits(values[r, None]),
                        present[r, None],
                        Segments(Edges([0, 150, 400])),
                    ),
                    torch.tensor([keep, keep]),
                    Rounds([rounds] * 2),
                    rank=r,
                    phase="t",
                )
            )
            for r in range(world)
        ]
        won = torch.stack(run_virtual(programs))
        for a, b in [(0, 150), (150, 400)]:
            inside, there = won[:, a:b], present[:, a:b]
            assert int(inside.sum()) == min(keep, int(there.sum()))
            assert not bool((inside & ~there).any())
            if rounds == EXACT and 0 < keep < int(there.sum()):
                magnitude = values[:, a:b].abs()
                assert magnitude[inside].min() >= magnitude[there & ~inside].max()


def test_segments_are_searched_together_as_they_would_be_alone():
    edges = [0, 1, 90, 400, 401, 1000]
    kinds = [COARSE, EXACT, MEDIUM, EXACT, COARSE]
    keep = torch.tensor([1, 20, 0, 3, 150])
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(3, 1000, generator=generator)
    values[:, ::9] = 0.5
    present = torch.rand(3, 1000, generator=generator) < 0.7

    def search(start: int, stop: int, which: slice, inside: list[int]) -> Tensor:
        programs = [
            alone(
                choose_largest(
                    Candidates(
                        magnitude_bits(values[rank, None, start:stop]),
                        present[rank, None, start:stop],
                        Segments(Edges(inside)),
                    ),
                    keep[which],
                    Rounds(kinds[which]),
                    rank=rank,
                    phase="t",
                )
            )
            for rank in range(3)
        ]
        return torch.stack(run_virtual(programs))

    together = search(0, 1000, slice(None), edges)
    for which, (start, stop) in enumerate(itertools.pairwise(edges)):
        apart = search(start, stop, slice(which, which + 1), [0, stop - start])
        assert torch.equal(together[:, start:stop], apart)
        assert int(apart.sum()) == min(int(keep[which]), int(present[:, start:stop].sum()))


def test_turns_count_inside_each_segment():
    chosen = torch.tensor([1, 0, 1, 1, 1, 0, 0, 1], dtype=torch.bool)
    segments = Segments(Edges([0, 3, 3, 7, 8]))
    turns, totals = segments.turns(chosen)
    assert turns.tolist() == [1, 1, 2, 1, 2, 2, 2, 1]
    assert totals.tolist() == [2, 0, 2, 1]
    assert segments.of.tolist() == [0, 0, 0, 2, 2, 2, 2, 3]
    assert segments.spread(torch.tensor([5, 6, 7, 8])).tolist() == [5, 5, 5, 7, 7, 7, 7, 8]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_hashed_regions_tile_the_group(world):
    ranks = Ranks(SplitReduce(), world, [(7,), (64, 768), (1000,)])
    rows = [ranks.compressors[0].session.rows(slot, None) for slot in ranks.group.slots]
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
        start, stop = hashed.edges.on_device[which : which + 2]
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


def test_settings_are_checked():
    with pytest.raises(UsageError, match="capacity is 3"):
        SplitReduce(capacity=3)
    with pytest.raises(UsageError, match="thresholds is 'fast'"):
        OkTopK(thresholds="fast")
    with pytest.raises(UsageError, match="must be a SplitReduce"):
        OkTopK(exchange=ReusedThresholds())
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
