"""Odd tensors on which selections have to end."""

from __future__ import annotations

import torch
from torch import Tensor


def odd_tensors() -> dict[str, Tensor]:
    return {
        "zeros": torch.zeros(5000),
        "constant": torch.full((5000,), -0.25),
        "one element": torch.tensor([3.0]),
        "one zero": torch.zeros(1),
        "two": torch.tensor([1.0, -2.0]),
        "mostly zero": torch.cat([torch.zeros(4990), torch.arange(1.0, 11.0)]),
        "ties": torch.arange(5000).remainder(3).float(),
        "tiny": torch.linspace(-1e-38, 1e-38, 5000),
        "huge": torch.linspace(-3e38, 3e38, 5000, dtype=torch.float64).float(),
        "outlier": torch.cat([torch.ones(4999), torch.tensor([1e30])]),
        "infinite": torch.cat([torch.ones(4999), torch.tensor([torch.inf])]),
    }
