"""Who owns which blocks: every element once, whole blocks, balanced, and never by the bucket."""

from __future__ import annotations

import pytest
import torch

from tests.exchange.ranks import make_group
from thinwire.layout import OwnedBlocks

SHAPES = [(1,), (31,), (32,), (33,), (7, 100), (64, 64), (3,), (129,)]


@pytest.mark.parametrize("owners", [1, 2, 3, 5, 16])
def test_every_element_is_there_once_and_comes_back(owners):
    group = make_group(SHAPES)
    owned = OwnedBlocks(group, 32, owners)
    flat = torch.zeros(group.numel)
    for slot in group.slots:
        slot.span(flat).copy_(torch.arange(1, slot.numel + 1) + 10_000 * slot.offset)
    blocks = owned.cut(flat)
    assert blocks.shape == (owners, owned.width, 32)
    assert (blocks != 0).sum() == sum(slot.numel for slot in group.slots) == owned.lengths.sum()
    back = torch.zeros_like(flat)
    for owner in range(owners):
        owned.write(owned.cut(flat, [owner]), back, [owner])
    assert torch.equal(back, flat)
    for owner in range(owners):
        for block in range(owned.width):
            if owned.lengths[owner, block]:
                slot = group.slots[int(owned.slots[owner, block])]
                begin = slot.offset + int(owned.places[owner, block])
                length = int(owned.lengths[owner, block])
                assert torch.equal(blocks[owner, block, :length], flat[begin : begin + length])


def test_owners_do_not_know_the_bucket():
    names = [f"layer{index}" for index in range(len(SHAPES))]
    together = OwnedBlocks(make_group(SHAPES, names=names), 32, 4)
    for index, (shape, name) in enumerate(zip(SHAPES, names, strict=True)):
        alone = OwnedBlocks(make_group([shape], names=[name]), 32, 4)
        ours = [(run.owner, run.first, run.blocks) for run in together.runs if run.slot == index]
        assert ours == [(run.owner, run.first, run.blocks) for run in alone.runs]


def test_small_slots_take_turns():
    group = make_group([(40,)] * 200, names=[f"block.{index}.scale" for index in range(200)])
    owned = OwnedBlocks(group, 64, 4)
    assert owned.blocks == 200 and owned.width < 65


def test_a_large_slot_is_shared_evenly():
    owned = OwnedBlocks(make_group([(1000, 1001)]), 128, 7)
    counts = [sum(run.blocks for run in owned.runs if run.owner == rank) for rank in range(7)]
    assert max(counts) - min(counts) <= 1
