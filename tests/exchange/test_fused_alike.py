"""Virtual ranks whose payloads share a collective with small sums still decode once for all."""

from __future__ import annotations

import pytest

from tests.contracts.cluster import Cluster, sparse
from thinwire.exchange.gather import AllGatherFast


@pytest.mark.parametrize("bias", [1, 100, 4000])
def test_payloads_are_decoded_once_whatever_travels_beside_them(monkeypatch, bias):
    decoded = []
    read = AllGatherFast._read

    def counted(self, gathered, offer):
        decoded.append(gathered)
        return read(self, gathered, offer)

    monkeypatch.setattr(AllGatherFast, "_read", counted)
    cluster = Cluster(4, sparse(density=0.05), shapes={"weight": (200, 200), "bias": (bias,)})
    for count in range(2):
        cluster.step(cluster.random(count))
        assert len(decoded) == count + 1
