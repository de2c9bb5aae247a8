"""A tally that counts buckets and adds up parameters when asked says what one says that adds up in every step."""

from __future__ import annotations

import pytest
import torch

from thinwire.exchange.requests import Program, Sum
from thinwire.observe.ledger import Ledger
from thinwire.observe.stats import ParameterStats, Tally, TrafficRow, WayTraffic


def describe(step: int) -> WayTraffic:
    """A dense parameter, and two whose counts shapes tell in all steps but every third."""
    entries = (None, None) if step % 3 == 2 else (2, 1)
    rows = [
        TrafficRow("b", 5, 40.0 + step, 5, compressed=False),
        TrafficRow("w", 24, 1 / 3, entries[0], compressed=True),
        TrafficRow("v", 9, 2.5, entries[1], compressed=True),
    ]
    return WayTraffic(rows, dense_share=4 / 3 * 4)


def ask(step: int) -> Program[None]:
    yield (Sum(torch.zeros(3 * step), "sum"),)
    yield (Sum(torch.zeros(3), "sum"),)


@pytest.mark.parametrize("most", [1, 4096])
@pytest.mark.parametrize("kept", [True, False], ids=["the same ways", "new ways"])
def test_totals_are_those_of_all_steps(most, kept):
    tally = Tally(Ledger(3), lambda request: request.sent_bytes(3), most)
    known = [describe(step) for step in range(4)]
    expected = {row.name: ParameterStats() for row in known[0].rows}
    for step in range(30):
        traffic = known[step % 4] if kept else describe(step % 4)
        for _ in tally.count(ask(step), traffic):
            pass
        sent, whole = 16 * step + 16, sum(row.nbytes for row in traffic.rows)
        for row in traffic.rows:
            total, entries = expected[row.name], row.entries or 0
            total.exchanges += 1
            total.elements += row.elements
            total.entries += entries
            total.dense_bytes += 4 / 3 * 4 * row.elements
            total.wire_bytes += sent * row.nbytes / whole
            total.compressed_elements += row.compressed * row.elements
            total.compressed_entries += row.compressed * entries
        if step in (3, 4, 20):
            assert tally.parameters["w"].exchanges == step + 1
    found = tally.stats(30, 0)
    assert found.parameters.keys() == expected.keys()
    for name, row in expected.items():
        assert vars(found.parameters[name]) == pytest.approx(vars(row))
    assert found.density == sum(expected[n].entries for n in "wv") / (30 * 33)
