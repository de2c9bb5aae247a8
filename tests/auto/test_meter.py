"""How much of a gradient its largest entries have, from one pass over it."""

from __future__ import annotations

import pytest
import torch

from thinwire.auto.clock import EnergyMeter
from thinwire.layout import ParameterInfo, SlotKind, lay_out
from thinwire.plan.candidates import EnergyCurve


def share(flat: torch.Tensor, density: float) -> float:
    info = ParameterInfo("w", tuple(flat.shape), (1,), flat.dtype, SlotKind.LINEAR)
    meter = EnergyMeter()
    meter.look(lay_out([info], flat.dtype, flat.device), flat)
    return EnergyCurve(meter.curve(("w",))).share(density)


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1.0, 3e4])
def test_the_largest_entries_come_first_whatever_their_scale(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    flat = scale * torch.randn(20_000, generator=generator) ** 3
    exact = flat.square().sort(descending=True).values.cumsum(0) / flat.square().sum()
    for density in (0.01, 0.1, 0.5):
        assert share(flat, density) == pytest.approx(float(exact[int(20_000 * density)]), abs=0.1)


def test_zeros_are_the_smallest_entries() -> None:
    flat = torch.zeros(10_000)
    flat[::100] = torch.linspace(1e-3, 1e-2, 100)
    assert share(flat, 0.01) == pytest.approx(1.0)
    assert EnergyMeter().curve(("w",)) == ()
