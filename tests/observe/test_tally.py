"""A tally that counts buckets and adds up slots when asked says what one says that adds up slots in every step."""

from __future__ import annotations

import pytest
import torch

from tests.contracts.cluster import parameter
from thinwire.compressor import Opened
from thinwire.exchange.requests import Place, Program
from thinwire.layout import BucketLayout
from thinwire.observe import stats
from thinwire.observe.ledger import Ledger
from thinwire.observe.stats import ParameterStats, Tally
from thinwire.plan.groups import Group

PLACE = Place(1, 3)


def make_bucket() -> tuple[BucketLayout, list[Group]]:
    infos = [parameter("w", (4, 6)), parameter("b", (5,)), parameter("v", (3, 3))]
    slots, offset = [], 0
    for info in infos:
        slots.append(info.slot(offset))
        offset += info.numel
    layout = BucketLayout(tuple(slots), offset, torch.float32, torch.device("cpu"))
    members = ([slots[1]], [slots[0], slots[2]])
    return layout, [Group.of(layout, part, torch.float32) for part in members]


def nothing() -> Program[None]:
    yield ()


def describe(step: int) -> list[Opened]:
    """A dense group, and one whose counts shapes tell in all steps but every third."""
    dense = Opened(nothing(), None, [40.0 + step], [5], compressed=False)
    entries = None if step % 3 == 2 else [2, 1]
    return [dense, Opened(nothing(), None, [1 / 3, 2.5], entries)]


@pytest.mark.parametrize("most", [1, 4096])
@pytest.mark.parametrize("kept", [True, False], ids=["the same lists", "new lists"])
def test_totals_are_those_of_all_steps(monkeypatch, most, kept):
    monkeypatch.setattr(stats, "MOST_REPEATED", most)
    layout, groups = make_bucket()
    tally = Tally(Ledger(3))
    expected = {slot.name: ParameterStats() for group in groups for slot in group.slots}
    known = [describe(step) for step in range(4)]
    for step in range(30):
        opened = known[step % 4] if kept else describe(step % 4)
        tally.add_bucket(layout, groups, opened, PLACE)
        for group, one in zip(groups, opened, strict=True):
            for which, slot in enumerate(group.slots):
                row, entries = expected[slot.name], one.entries[which] if one.entries else 0
                row.exchanges += 1
                row.elements += slot.numel
                row.entries += entries
                row.dense_bytes += 4 / 3 * 4 * slot.numel
                row.wire_bytes += one.slot_bytes[which]
                row.compressed_elements += one.compressed * slot.numel
                row.compressed_entries += one.compressed * entries
        if step in (3, 4, 20):
            assert tally.parameters["w"].exchanges == step + 1
        assert len(tally._repeated) <= max(most, 2 * 30) + 1
    found = tally.stats(30, 0)
    assert found.parameters.keys() == expected.keys()
    for name, row in expected.items():
        assert vars(found.parameters[name]) == pytest.approx(vars(row))
    assert found.density == sum(expected[n].entries for n in "wv") / (30 * 33)
