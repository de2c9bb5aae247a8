"""Replicas on a GPU: the bits of a fingerprint, and a comparison that is read one step later without a wait."""

from __future__ import annotations

import pytest
import torch

from thinwire.engine.replicas import ReplicaWatch
from thinwire.engine.virtual import run_virtual
from thinwire.kernels.fingerprint import fingerprint, row_fingerprints

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WORLD = 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_fingerprint_is_that_of_the_cpu(dtype):
    tensors = [torch.randn(n, 33).to(dtype) for n in (1, 700, 200_000)]
    assert int(fingerprint([one.cuda() for one in tensors])) == int(fingerprint(tensors))
    rows = torch.randint(0, 256, (4, 100_003), dtype=torch.uint8)
    assert torch.equal(row_fingerprints(rows.cuda()).cpu(), row_fingerprints(rows))


@pytest.mark.parametrize("every", [1, 2])
def test_a_comparison_is_read_one_step_later(every):
    parameters = [{"w": torch.ones(1 << 20, device="cuda")} for _ in range(WORLD)]
    watches = [ReplicaWatch(one, every=every) for one in parameters]
    parameters[2]["w"][12345] = 1.0000001
    found = []
    for step in range(1, 6):
        if not watches[0].is_due(step):
            found.append([watch.find(step, WORLD) for watch in watches])
            continue
        for watch, one in zip(watches, parameters, strict=True):
            watch.note_update([one["w"]])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_virtual([watch.look(step) for watch in watches])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append([watch.find(step, WORLD) for watch in watches])
    ranks = [{None if one is None else one.ranks for one in step} for step in found]
    expected = {1: [None, (2,), (2,), (2,), (2,)], 2: [None, None, (2,), None, (2,)]}[every]
    assert ranks == [{one} for one in expected]
