"""Low rank in Adam's scale: three workers against the papers' recursions, on c / divisor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.optim.adam_job import (
    SETTINGS,
    START,
    WORKERS,
    check_close,
    in_scale,
    refreshed,
    start,
    train,
    train_by_rule,
)
from thinwire.errors import UsageError
from thinwire.layout import ParameterInfo, contiguous_strides, kind_from_shape
from thinwire.lowrank.basis import name_hash
from thinwire.lowrank.matrices import matrices_of
from thinwire.lowrank.memory import LowRankMemory
from thinwire.lowrank.reference import AlternatingReference, TwoPhaseReference

BETA1, EPS = SETTINGS["betas"][0], SETTINGS["eps"]
RANK = 2
STEPS = START + 6
METHODS = {
    "powersgd": tw.PowerSGD(rank=RANK, dense_fallback=False),
    "acpsgd": tw.ACPSGD(rank=RANK, dense_fallback=False),
}


class Compressed:
    """One matrix behind the dense start; `every` is how often v learns from the mean gradient."""

    def __init__(self, name: str, kind: str, v: Tensor, u: Tensor, every: int | None) -> None:
        shape = tuple(v.shape)
        info = ParameterInfo(
            name, shape, contiguous_strides(shape), v.dtype, kind_from_shape(len(shape))
        )
        drawn = [
            LowRankMemory(RANK).draw(name, side, matrices_of(info.slot(0)), v.dtype)[0]
            for side in ("p", "q")
        ]
        self.kind, self.name, self.every = kind, name, every
        self.reference = (
            TwoPhaseReference(drawn[1], WORKERS, shape)
            if kind == "powersgd"
            else AlternatingReference(*drawn, WORKERS, shape)
        )
        self.v, self.u = v, [u] * WORKERS
        self.residuals = [torch.zeros_like(v)] * WORKERS
        self.steps = 0

    def step(self, gradients: list[Tensor]) -> Tensor:
        """The mean of what was sent, in units of the divisor."""
        self.steps += 1
        if self.every is not None and self.steps % self.every == 0:
            mean = sum(gradients) / WORKERS
            self.v = refreshed(self.v, mean, self.every, self.steps // self.every - 1)
        d = self.v.sqrt() + EPS
        self.u = [BETA1 * u + (1 - BETA1) * g for u, g in zip(self.u, gradients, strict=True)]
        self.reference.residuals = [residual / d for residual in self.residuals]
        in_units = [u / d for u in self.u]
        if self.kind == "powersgd":
            mean = self.reference.step(in_units)
        else:
            exchanged = START + self.steps - 1
            side = "p" if (exchanged + name_hash(self.name)) % 2 == 0 else "q"
            mean = self.reference.step(in_units, side)
        self.residuals = [residual * d for residual in self.reference.residuals]
        return mean


@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("kind", METHODS)
def test_three_workers_as_recomputed(kind: str, every: int | None) -> None:
    divisor = "frozen" if every is None else tw.memory.Refresh(every=every, bits=32)
    model, optimizer, simulation = start(in_scale(METHODS[kind], divisor=divisor))
    ours = train(optimizer, simulation, model, range(STEPS))
    assert not simulation.plan()["0.weight"].dense

    def take_over(name: str, v: Tensor, u: Tensor) -> Compressed:
        return Compressed(name, kind, v, u, every)

    check_close(ours, train_by_rule(STEPS, take_over), 1e-2)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [({"limit": 3.0}, "limit is 3.0"), ({"storage": "bf16"}, "storage is 'bf16'")],
)
def test_what_factors_cannot_do_is_refused(settings: dict, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        in_scale(METHODS["powersgd"], **settings)
