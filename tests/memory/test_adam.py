"""What Adam's memory divides by."""

from __future__ import annotations

import math

import torch

from thinwire.memory.adam import nearest_root


def test_roots_are_rounded_to_nearest():
    """So that the divisor has the same bits on a CPU and on a GPU."""
    v = torch.randn(4099, generator=torch.Generator().manual_seed(0)).mul(9).exp()
    v[:3] = torch.tensor([0.0, 1e-45, 3e38])
    wanted = torch.tensor([math.sqrt(one) for one in v.tolist()], dtype=torch.float64).float()
    assert torch.equal(nearest_root(v), wanted)
