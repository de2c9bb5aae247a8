"""Messages of fixed size: which entries get a place, in which order, and that what cannot be in its place is refused."""

from __future__ import annotations

import pytest
import torch

from tests.exchange.ranks import Ranks
from thinwire.errors import WireError
from thinwire.exchange.places import Places, largest_sums, pack, propose, unpack
from thinwire.exchange.regions import HashedRegions
from thinwire.exchange.split import SplitReduce
from thinwire.layout import RowTable


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_an_index_that_cannot_be_in_its_place_is_refused(wire):
    lowest, highest = (torch.tensor(n, dtype=torch.int32) for n in ([0, 0, 8], [7, 7, 11]))
    indices = torch.tensor([[[7, -1, 8], [0, 5, -1]]], dtype=torch.int32)
    values = torch.tensor([[[1.0, 0.0, 2.0], [3.0, 4.0, 0.0]]], dtype=wire)
    found, numbers = unpack(pack(indices, values), wire, lowest, highest)
    assert torch.equal(found, indices)
    assert torch.equal(numbers, values)
    for wrong in (-2, 7, 12):
        bad = indices.clone()
        bad[0, 0, 2] = wrong
        with pytest.raises(WireError, match="outside its owner's region"):
            unpack(pack(bad, values), wire, lowest, highest)


def make_places(world: int, sizes: list[int], rooms: list[int]) -> Places:
    """So many places for each of some vectors."""
    ranks = Ranks(SplitReduce(), world, [(size,) for size in sizes])
    rows = [ranks.compressors[0].session.selector.rows(slot) for slot in ranks.group.slots]
    regions = HashedRegions(RowTable(rows, ranks.group.numel), world, torch.device("cpu"))
    return Places(regions, rooms, world)


def test_the_largest_of_a_box_are_sent_in_the_order_of_the_entries():
    places = make_places(2, [100, 50], [2, 3])
    # Boxes are owner x 2 slots + slot; the first overflows, and its tie goes to the first entry.
    box = torch.tensor([0, 0, 0, 0, 1, 3, 3, 2])
    wire = torch.tensor([1.0, -2.0, 2.0, -2.0, 5.0, 0.0, 7.0, -0.5])
    proposal = propose(wire, box, torch.arange(8), places)
    assert proposal.indices.tolist() == [[1, 2, 4, -1, -1], [7, -1, 6, -1, -1]]
    assert proposal.values.tolist() == [[-2.0, 2.0, 5.0, 0.0, 0.0], [-0.5, 0.0, 7.0, 0.0, 0.0]]
    assert proposal.placed.tolist() == [False, True, True, False, True, False, True, True]


def test_the_largest_sums_come_by_rising_index_and_ties_go_to_the_lowest():
    places = make_places(2, [100, 50], [3, 2])
    edge = int(places.regions.edges[1])
    arrived = torch.tensor([[9, 2, 30, edge, -1], [2, 7, 5, edge, edge + 4]], dtype=torch.int32)
    sums = torch.zeros(places.regions.size + 1)
    for index, value in (
        (9, -3.0),
        (2, 0.0),
        (30, 1.0),
        (7, 1.0),
        (5, -1.0),
        (edge, 0.0),
        (edge + 4, 2.0),
    ):
        sums[1 + index] = value
    assert largest_sums(sums, arrived, places, places).tolist() == [5, 7, 9, edge, edge + 4]


def test_a_sum_is_sent_once_where_little_arrived():
    places = make_places(2, [100, 50], [3, 2])
    edge = int(places.regions.edges[1])
    arrived = torch.tensor([[8, -1, -1, edge, -1], [-1, -1, -1, -1, -1]], dtype=torch.int32)
    sums = torch.ones(places.regions.size + 1)
    assert largest_sums(sums, arrived, places, places).tolist() == [8, -1, -1, edge, -1]


def test_indices_in_a_region_rise_with_positions():
    regions = make_places(3, [5000, 700], [1, 1]).regions
    for slot, (begin, numel) in enumerate(((0, 5000), (5000, 700))):
        positions = torch.arange(begin, begin + numel)
        box, index = regions.locate(positions, torch.full_like(positions, slot))
        for owner in range(3):
            mine = index[box == owner * 2 + slot]
            assert bool((mine.diff() > 0).all())
