"""Exchanges that promise never to read anything back: on the meta device, where there is nothing to read."""

from __future__ import annotations

import pytest
import torch

from tests.exchange.ranks import Ranks
from tests.exchange.test_virtual import EXCHANGES

SHAPES = [(64, 96), (3000,), (150, 90)]


def run_without_data(name: str, values: str, world: int = 3) -> None:
    ranks = Ranks(EXCHANGES[name], world, SHAPES, 0.05, values, device="meta")
    inputs = [torch.empty(ranks.numel, device="meta") for _ in range(world)]
    had = torch.ones(world, len(SHAPES), dtype=torch.bool, device="meta")
    for _ in range(2):
        ranks.step(inputs, had=had)


@pytest.mark.parametrize("values", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name, one in EXCHANGES.items() if one.host_sync_free])
def test_nothing_is_read_back(name, values):
    run_without_data(name, values)


@pytest.mark.parametrize(
    "name", [name for name, one in EXCHANGES.items() if not one.host_sync_free]
)
def test_the_others_would_be_noticed(name):
    with pytest.raises((RuntimeError, NotImplementedError)):
        run_without_data(name, "fp32")
