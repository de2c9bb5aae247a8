"""Selections of places: random ones and chunks."""

from __future__ import annotations

import pytest
import torch

from tests.contracts.cluster import parameter
from thinwire.errors import UsageError
from thinwire.layout import WHOLE_TENSOR, RowTable, rows_along
from thinwire.select.chunks import ChunkChoice
from thinwire.select.random import Drawing, RandomChoice

CPU = torch.device("cpu")


def draw(name="w", *, length=10_000, keep=10, step=0, seed=0):
    slot = parameter(name, (length,)).slot(0)
    rows = rows_along(slot, WHOLE_TENSOR, 1.0).keeping(keep)
    return Drawing(RowTable([rows], length), seed, CPU).draw([step])


@pytest.mark.parametrize(
    "length, keep", [(1, 1), (10, 10), (10, 1), (101, 7), (101, 100), (1 << 20, 1000)]
)
def test_drawn_places_are_different_ascending_and_inside(length, keep):
    for step in range(40):
        places = draw(length=length, keep=keep, step=step)
        assert places.shape == (keep,) and (places.diff() > 0).all()
        assert int(places[0]) >= 0 and int(places[-1]) < length


@pytest.mark.parametrize("length, keep", [(23, 5), (101, 3)])
def test_every_place_is_equally_likely_and_so_is_every_gap(length, keep):
    """One of each stratum: neighbours are up to two strata apart, and never further."""
    rows = rows_along(parameter("w", (length,)).slot(0), WHOLE_TENSOR, 1.0).keeping(keep)
    drawing = Drawing(RowTable([rows], length), 0, CPU)
    draws = 5_000
    every = torch.cat([drawing.draw([step])[None] for step in range(draws)])
    expected = draws * keep / length
    hits = every.reshape(-1).bincount(minlength=length)
    assert ((hits - expected).abs() < 5 * expected**0.5).all()
    gaps = torch.cat([every.diff(dim=1), (every[:, :1] - every[:, -1:]) + length], 1)
    assert gaps.min() == 1 and 1.5 * length / keep < gaps.max() < 2 * (length // keep + 1)


def test_tables_draw_for_every_slot_what_it_draws_alone():
    sizes = {"a": (50, 20), "b": (7,), "c": (333,)}
    slots, offset = [], 0
    for name, shape in sizes.items():
        slots.append(parameter(name, shape).slot(offset))
        offset += slots[-1].numel
    table = RowTable([RandomChoice(0.1).rows(slot, None) for slot in slots], offset)
    together = Drawing(table, 3, CPU)
    for steps in ([4, 4, 4], [0, 9, 1]):
        drawn = together.draw(steps).split([rows.keep for rows in table.rows])
        for slot, rows, step, places in zip(slots, table.rows, steps, drawn, strict=True):
            alone = draw(slot.name, length=rows.length, keep=rows.keep, step=step, seed=3)
            assert torch.equal(alone, places)


def test_draws_belong_to_name_step_and_seed_and_leave_the_global_generator_alone():
    before = torch.random.get_rng_state()

    def places(name, step, seed=0):
        return draw(name, step=step, seed=seed).tolist()

    assert places("a", 1) == places("a", 1)
    assert len({tuple(places(n, s, k)) for n in "ab" for s in range(3) for k in range(2)}) == 12
    assert torch.equal(before, torch.random.get_rng_state())


def test_sessions_of_two_ranks_choose_the_same_places_in_every_step():
    selector = RandomChoice(0.1)
    slot = parameter("w", (50, 20)).slot(0)
    table = RowTable([selector.rows(slot, None)], slot.numel)
    chosen = []
    for rank in range(2):
        session = selector.session()
        c = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
        steps = []
        for step in range(3):
            session.begin(["w"], [step])
            picks = session.pick(c, table)
            assert torch.equal(picks.values, c[picks.indices])
            steps.append(picks.indices.tolist())
        chosen.append(steps)
    assert chosen[0] == chosen[1] and chosen[0][0] != chosen[0][1]


@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 1000, 2049])
@pytest.mark.parametrize("chunk", [1, 7, 256])
@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_chunks_cover_the_tensor_and_the_largest_are_chosen(n, chunk, density):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    selector = ChunkChoice(density, chunk)
    table = RowTable([selector.rows(parameter("w", (n,)).slot(0), None)], n)
    rows = table.rows[0]
    assert rows.chunk <= chunk and (rows.chunks - 1) * rows.chunk < n <= rows.chunks * rows.chunk
    picks = selector.pick(x, table)
    count = int(picks.counts[0])
    chosen = picks.indices[:count]
    assert (chosen.diff() > 0).all() and torch.equal(picks.values[:count], x[chosen])
    assert not picks.values[count:].any() and not picks.indices[count:].any()
    pieces = x.split(rows.chunk)
    norms = torch.stack([piece.abs().sum() for piece in pieces])
    best = set(norms.argsort(descending=True, stable=True)[: rows.chosen].tolist())
    assert {int(i) // rows.chunk for i in chosen} == best
    assert count == sum(pieces[which].numel() for which in best)
    if density == 1.0:
        assert count == n


def test_chunks_of_many_tensors_are_those_of_each():
    """Neighbours with chunks of one length, a gap, a last chunk that is short, and one tensor of a single chunk."""
    sizes, offsets = (512, 1024, 700, 40, 9), (0, 512, 1600, 2300, 2340)
    pairs = zip("abcde", sizes, offsets, strict=True)
    slots = [parameter(name, (size,)).slot(offset) for name, size, offset in pairs]
    selector = ChunkChoice(0.3, 64)
    c = torch.randn(2400, generator=torch.Generator().manual_seed(1))
    for late in (False, True):
        if late:
            for slot in slots:
                slot.span(c)[-1] = 100.0
        table = RowTable([selector.rows(slot) for slot in slots], c.numel())
        picks = selector.pick(c, table)
        for index, slot in enumerate(slots):
            alone = RowTable([selector.rows(slot.at(0))], slot.numel)
            one = selector.pick(slot.span(c), alone)
            span = table.slot_slice(index)
            assert torch.equal(picks.indices[span], one.indices)
            assert torch.equal(picks.values[span], one.values)
            assert picks.counts[index] == one.counts[0]


def test_equal_chunks_tie_to_the_lowest():
    selector = ChunkChoice(0.25, 4)
    table = RowTable([selector.rows(parameter("w", (32,)).slot(0), None)], 32)
    assert selector.pick(torch.ones(32), table).indices.tolist() == list(range(8))


def test_bad_settings_are_named():
    with pytest.raises(UsageError, match="chunk"):
        ChunkChoice(0.1, 0)
    with pytest.raises(UsageError, match="density"):
        RandomChoice(2.0)
