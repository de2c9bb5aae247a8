"""Words on the wire: every exchange against its formula, on every step, and flat in the number of ranks."""

from __future__ import annotations

import csv
import math

import pytest

from tests.exchange.ranks import KINDS, Ranks, gradients
from thinwire.exchange.agreed import CyclicLeader
from thinwire.exchange.all_gather import AllGather
from thinwire.exchange.dsa import SplitGather
from thinwire.exchange.exclusive import Exclusive
from thinwire.exchange.reused import ReusedThresholds
from thinwire.exchange.split import SplitReduce
from thinwire.exchange.tree import TreeMerge
from thinwire.observe.ledger import Ledger
from thinwire.tools.traffic import COLUMNS, write_ledger

WORD = 4


def worst(step, attribute: str = "payload_bytes") -> float:
    """Words of the busiest rank."""
    return max(getattr(traffic, attribute) for traffic in step.traffic) / WORD


@pytest.mark.parametrize("contribution", ["selected", "full"])
@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_split_reduce_stays_within_its_bound_on_every_step(world, contribution):
    ranks = Ranks(SplitReduce(contribution=contribution), world, [(3000,), (40, 50)], 0.05)
    bound = 6 * ranks.k * (world - 1) / world
    for seed in range(2 * len(KINDS)):
        step = ranks.step(gradients(KINDS[seed % len(KINDS)], world, ranks.numel, seed))
        assert worst(step) <= bound
        # Padding included: what really travels is bounded too.
        if contribution == "selected":
            assert max(t.sent_bytes - t.control_bytes for t in step.traffic) / WORD <= bound


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_exclusive_sends_three_words_per_entry(world):
    ranks = Ranks(Exclusive(), world, [(4000,), (64, 50)], 0.05)
    bound = 3 * ranks.k * (world - 1) / world
    for seed in range(world):
        step = ranks.step(gradients("normal", world, ranks.numel, seed))
        mean = sum(t.payload_bytes for t in step.traffic) / world / WORD
        assert mean == pytest.approx(bound, rel=0.02)
        # A slot's parts differ by one entry at most.
        assert worst(step) <= bound + 3 * world * len(ranks.shapes)


def test_baselines_send_what_their_papers_say():
    """A baseline that sends more than its formula would be an unfair one."""
    world, n, density = 8, 20000, 0.01
    k = n * density
    inputs = gradients("normal", world, n)

    def one(exchange) -> Ranks:
        return Ranks(exchange, world, [(n,)], density)

    gather = one(AllGather()).step(inputs)
    assert worst(gather) == 2 * k * (world - 1)
    tree = one(TreeMerge()).step(inputs)
    assert worst(tree) == 2 * k * math.log2(world)
    leader = one(CyclicLeader()).step(inputs)
    assert worst(leader) <= k + 2 * k * (world - 1) / world + 8
    dsa = one(SplitGather()).step(inputs)
    assert 4 * k * (world - 1) / world * 0.8 <= worst(dsa) <= (2 * k + n) * (world - 1) / world


def test_published_thresholds_overshoot_and_the_ledger_shows_it():
    world = 8
    ranks = Ranks(ReusedThresholds(), world, [(20000,)], 0.01)
    bound = 6 * ranks.k * (world - 1) / world
    words = [worst(ranks.step(gradients("normal", world, 20000, seed))) for seed in range(20)]
    assert words[0] > bound


@pytest.mark.parametrize(
    ("exchange", "words"),
    [(SplitReduce(), 4), (SplitReduce(contribution="full"), 5), (Exclusive(), 3)],
    ids=["split", "full", "exclusive"],
)
def test_words_do_not_grow_with_the_number_of_ranks(exchange, words):
    measured = []
    for world in (4, 16, 128):
        ranks = Ranks(exchange, world, [(2**16,)], 0.1)
        step = ranks.step(gradients("normal", world, ranks.numel))
        mean = sum(t.payload_bytes for t in step.traffic) / world / WORD
        measured.append(mean / ranks.k * world / (world - 1))
    assert max(measured) <= 1.1 * min(measured)
    assert max(measured) <= words * 1.01


def test_control_words_are_few_for_large_groups():
    ranks = Ranks(SplitReduce(), 4, [(2**18 * 4,)], 0.25)
    assert ranks.k == 2**18
    step = ranks.step(gradients("normal", 4, ranks.numel))
    for traffic in step.traffic:
        assert traffic.control_bytes < 0.05 * traffic.payload_bytes


def test_ledger_rows_add_up_and_reach_a_file(tmp_path):
    ranks = Ranks(SplitReduce(), 3, [(2000,)], 0.05)
    step = ranks.step(gradients("normal", 3, 2000))
    for ledger in step.ledgers:
        for row in ledger.rows().values():
            assert row.payload_bytes >= 0
            assert row.payload_bytes + row.padding_bytes + row.control_bytes == row.sent_bytes
    write_ledger(tmp_path / "ledger.csv", dict(enumerate(step.ledgers)))
    rows = list(csv.DictReader((tmp_path / "ledger.csv").open()))
    assert tuple(rows[0]) == COLUMNS
    assert {row["rank"] for row in rows} == {"0", "1", "2"}
    assert sum(int(row["sent_bytes"]) for row in rows) == sum(t.sent_bytes for t in step.traffic)
    assert isinstance(step.ledgers[0], Ledger)
