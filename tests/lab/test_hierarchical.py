"""Dense inside a host and sparse between hosts, on links of which one is slow: what the interface really carries."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from thinwire.lab import Lab, LabSpec

WORKER = Path(__file__).with_name("hierarchical_worker.py")
PER_HOST = 2


@pytest.mark.root
def test_the_slow_link_carries_one_shard_per_local_rank() -> None:
    with Lab(LabSpec(hosts=2, ranks_per_host=PER_HOST, rate="200mbit")) as lab:
        result = lab.run([sys.executable, str(WORKER)], timeout_s=60)
    assert (result.exit_code, result.reason) == (0, "")
    for rank in result.ranks:
        flat, flat_ledger, carried, ledger = map(int, rank.output.split())
        # Both local ranks share the interface, and all that their ledgers have between hosts crosses it.
        assert carried == pytest.approx(PER_HOST * ledger, rel=0.05)
        # The ledger's bytes of a rank are those of the flat exchange over the ranks of a host, for P = 4 and 2 hosts:
        # (1/2) / (3/4) of them, over half the entries.
        assert ledger == pytest.approx(flat_ledger / PER_HOST * (1 / 2) / (3 / 4), rel=0.1)
        # A flat all-gather in a ring crosses a host's border once and not twice, hence a bit more than 1 / per_host.
        assert 0.9 / PER_HOST <= carried / flat <= 1.3 / PER_HOST
