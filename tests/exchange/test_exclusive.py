from __future__ import annotations

import pytest
import torch

from tests.exchange.ranks import Ranks, gradients
from thinwire.exchange.agreed import CyclicLeader
from thinwire.exchange.exclusive import Exclusive, Parts, RowCut
from thinwire.layout import RowTable
from thinwire.select.topk import AllDimensionTopK

CPU = torch.device("cpu")


def table_of(ranks: Ranks) -> RowTable:
    rows = [ranks.compressors[0].session.selector.rows(slot) for slot in ranks.group.slots]
    return RowTable(rows, ranks.group.numel)


@pytest.mark.parametrize("world", [2, 3, 8, 64])
@pytest.mark.parametrize("select", [None, AllDimensionTopK(0.05)], ids=["whole", "rows"])
def test_parts_tile_every_slot_and_share_out_its_entries(world, select):
    ranks = Ranks(Exclusive(), 1, [(640, 32), (7, 96), (5,)], 0.05, select=select)
    table = table_of(ranks)
    parts = Parts(table, world, CPU)
    marks = torch.zeros(ranks.group.numel)
    for rows, cut in zip(table.rows, parts.cuts, strict=True):
        assert sum(cut.entries(part) for part in range(world)) <= rows.entries
        for part in range(world):
            if isinstance(cut, RowCut):
                cut.parts[part].matrix(marks).add_(1)
            else:
                places = cut.starts[part][:, None] + torch.arange(cut.block)
                assert places.numel() == cut.rows_of(part, 0).length
                marks[places[places < cut.end]] += 1
    assert all(bool((slot.span(marks) == 1).all()) for slot in ranks.group.slots)


def test_a_sample_knows_where_its_elements_come_from():
    table = table_of(Ranks(Exclusive(), 1, [(300, 70), (7, 96), (5,), (40, 50)], 0.05))
    parts = Parts(table, 4, CPU)
    c = torch.arange(1.0, table.numel + 1)
    for part in range(4):
        (sample,) = parts.cut_samples((part,) * 4)
        taken, table_of_sample = sample.take(c), sample.table
        for which, rows in enumerate(table_of_sample.rows):
            span = table_of_sample.slot_slice(which)
            for index in {0, rows.length // 3, rows.length - 1}:
                indices = torch.zeros(table_of_sample.entries, dtype=torch.int64)
                indices[span] = index
                place = sample.positions(indices)[span][0]
                assert taken[rows.slot.offset + index] == (c[place] if place >= 0 else 0)


def test_every_rank_visits_every_part():
    parts = Parts(table_of(Ranks(Exclusive(), 1, [(640,)], 0.05)), 4, CPU)
    assert {parts.turns([step])[0] for step in range(4)} == {0, 1, 2, 3}


@pytest.mark.parametrize("select", [None, AllDimensionTopK(0.05)], ids=["whole", "rows"])
def test_every_place_is_chosen_by_its_part_and_all_ranks_contribute(select):
    world = 4
    ranks = Ranks(Exclusive(), world, [(40, 50)], 0.05, select=select)
    step = ranks.step(gradients("normal", world, 2000))
    chosen = step.update != 0
    assert int(chosen.sum()) == ranks.k
    assert torch.allclose(step.update[chosen], sum(step.before)[chosen] / world)
    for rank in range(world):
        assert not bool(step.after[rank][chosen].any())
        assert torch.equal(step.after[rank][~chosen], step.before[rank][~chosen])


def test_rows_select_what_the_whole_selection_would():
    """With enough rows every part is a run of them, and its rank's own top-k of each row wins."""
    world, ranks = 4, Ranks(Exclusive(), 4, [(40, 50)], select=AllDimensionTopK(0.1))
    step = ranks.step(gradients("normal", world, 2000))
    cut = Parts(table_of(ranks), world, CPU)
    for rank in range(world):
        part = cut.cuts[0].parts[(cut.turns([0])[0] + rank) % world]
        mine = part.matrix(step.before[rank]).abs().topk(part.keep).indices.sort().values
        won = part.matrix(step.update) != 0
        assert torch.equal(won.nonzero()[:, 1].view(mine.shape), mine)


def test_a_loud_region_is_not_cut_short():
    """Parts are fair samples: the update has most of what the largest k entries of the sum hold."""
    world, n = 4, 16384
    loud = torch.where(torch.arange(n) < n // 8, 100.0, 1.0)
    inputs = [g * loud for g in gradients("normal", world, n)]
    ranks = Ranks(Exclusive(), world, [(n,)], 0.05)
    step = ranks.step(inputs)
    assert bool((step.update[n // 8 :] == 0).all())


@pytest.mark.parametrize("values", ["fp32", "bf16"])
def test_result_does_not_depend_on_the_bucketing(values):
    whole = Ranks(Exclusive(), 3, [(40, 50), (3000,)], 0.05, values, names=("a", "b"))
    parts = [
        Ranks(Exclusive(), 3, [shape], 0.05, values, names=(name,))
        for shape, name in (((40, 50), "a"), ((3000,), "b"))
    ]
    for seed in range(4):
        inputs = gradients("normal", 3, 5000, seed)
        together = whole.step(inputs)
        apart = [
            parts[0].step([g[:2000] for g in inputs]),
            parts[1].step([g[2000:] for g in inputs]),
        ]
        assert torch.equal(together.update, torch.cat([part.update for part in apart]))
        for rank in range(3):
            assert torch.equal(
                together.after[rank], torch.cat([part.after[rank] for part in apart])
            )


def test_leader_takes_turns():
    world, ranks = 3, Ranks(CyclicLeader(), 3, [(300,)], 0.1)
    for leader in range(world):
        step = ranks.step(gradients("normal", world, 300, leader))
        expected = step.before[leader].abs().topk(30).indices.sort().values
        assert torch.equal(step.update.nonzero().view(-1), expected)


@pytest.mark.parametrize("exchange", [Exclusive(), CyclicLeader()], ids=["exclusive", "leader"])
def test_an_unused_parameter_gets_its_entries_back(exchange):
    ranks = Ranks(exchange, 3, [(400,), (500,)], 0.1)
    first = gradients("normal", 3, 900)
    ranks.step(first)
    held = [ranks.residual(rank)[400:].clone() for rank in range(3)]
    had = torch.tensor([[True, False]] * 3)
    nothing = [torch.cat([g[:400], torch.zeros(500)]) for g in first]
    step = ranks.step(nothing, had=had)
    assert not bool(step.update[400:].any())
    for rank in range(3):
        assert torch.equal(ranks.residual(rank)[400:], held[rank])
