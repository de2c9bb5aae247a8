"""SIDCo's thresholds: a sparsity-inducing distribution fitted in one or more stages.

Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for Distributed Training Systems"
(MLSys 2021).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.select.finish import EstimateSession, TargetRows, ThresholdSelector
from thinwire.validate import check_bool, check_choice, check_positive_int

DISTRIBUTIONS = ("exponential", "gamma", "pareto")
FIRST_RATIO = 0.25
ADAPT_EVERY = 5
TOLERANCE = 0.2
LOG_FLOOR = 2.2e-16
"""Added before a logarithm is taken, as in the published code."""
# Halvings of the interval in which the gamma quantile is looked for.
QUANTILE_STEPS = 40


@dataclass(frozen=True)
class SIDCoThreshold(ThresholdSelector):
    """1. Fit the distribution to all magnitudes; the threshold is its quantile at ratio 0.25 (or at the density,
       with one stage).
    2. Each further stage fits what exceeds the threshold, and moves it to the quantile of that excess, such that
       the ratios of all stages multiply to the density. Gamma is followed by Pareto stages.

    `adapt` changes the number of stages of a tensor every five steps by how many survived.
    """

    distribution: str = "pareto"
    """"exponential", "gamma" or "pareto"."""
    stages: int = 2
    """How often what exceeds the threshold is fitted again, the first fit included."""
    adapt: bool = False
    """Let every tensor find its own number of stages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("distribution", self.distribution, DISTRIBUTIONS)
        check_positive_int("stages", self.stages)
        check_bool("adapt", self.adapt)

    def session(self) -> EstimateSession:
        return SIDCoSession(self) if self.adapt else EstimateSession(self)

    def estimate(self, x: Tensor, magnitude: Tensor, target: int) -> Tensor:
        return self.fit(magnitude, target / x.numel(), self.stages)

    def fit(self, magnitude: Tensor, density: float, stages: int) -> Tensor:
        """The threshold after `stages` stages; moments are masked sums, so no shape depends on data."""
        single = stages == 1 or density >= FIRST_RATIO
        threshold = self._first(magnitude, density if single else FIRST_RATIO)
        if single:
            return threshold
        ratio = (density / FIRST_RATIO) ** (1 / (stages - 1))
        for _ in range(stages - 1):
            above = magnitude > threshold
            count = above.sum()
            start = torch.where(above, magnitude, torch.inf).min()
            excess = torch.where(above, magnitude - start, 0.0)
            mean = excess.sum() / count
            variance = torch.where(above, (excess - mean) ** 2, 0.0).sum() / (count - 1)
            if self.distribution == "exponential":
                step = -mean * math.log(ratio)
            else:
                step = pareto_quantile(mean, variance, ratio)
            # With nothing above it, or all of it equal, there is nothing to fit.
            usable = (count > 1) & (mean > 0) & step.isfinite()
            threshold = torch.where(usable, start + step, threshold)
        return threshold

    def _first(self, magnitude: Tensor, ratio: float) -> Tensor:
        mean = magnitude.mean()
        match self.distribution:
            case "exponential":
                return -mean * math.log(ratio)
            case "pareto":
                variance = ((magnitude - mean) ** 2).sum() / max(1, magnitude.numel() - 1)
                return pareto_quantile(mean, variance, ratio)
            case _:
                return gamma_quantile(magnitude, mean, ratio)


def pareto_quantile(mean: Tensor, variance: Tensor, ratio: float) -> Tensor:
    """The value exceeded with probability `ratio` under the generalised Pareto law with these moments.

    Near shape 0 the law is exponential, and the closed form 0 / 0.
    """
    q = mean * mean / variance
    scale = mean * (q + 1) / 2
    shape = (q - 1) / 2
    flat = shape.abs() < 1e-4
    safe = torch.where(flat, 1.0, shape)
    return scale * torch.where(flat, -math.log(ratio), (1 - ratio**safe) / safe)


def gamma_quantile(magnitude: Tensor, mean: Tensor, ratio: float) -> Tensor:
    """The value exceeded with probability `ratio` under the gamma law, shape by Minka's closed estimate."""
    # Of the gradient at length 1, so that what keeps the logarithm of an exact zero finite is small beside it. Any smaller
    # number would let the zeros of a ReLU decide the fit.
    length = magnitude.norm().clamp(min=torch.finfo(magnitude.dtype).tiny)
    s = (mean / length + LOG_FLOOR).log() - (magnitude / length + LOG_FLOOR).log().mean()
    shape = ((3 - s + ((s - 3) ** 2 + 24 * s).sqrt()) / (12 * s)).double()
    low = torch.zeros_like(shape)
    # Chernoff: no gamma quantile at `ratio` lies beyond this.
    high = 2 * (shape + 2 * math.log(1 / ratio) + 1)
    for _ in range(QUANTILE_STEPS):
        middle = (low + high) / 2
        too_low = torch.special.gammaincc(shape, middle) > ratio
        low = torch.where(too_low, middle, low)
        high = torch.where(too_low, high, middle)
    return (mean.double() / shape * high).to(magnitude.dtype)


@dataclass
class Stages:
    """What the adaptation knows of one tensor."""

    stages: int
    direction: int = 1
    ratios: float = 0.0
    calls: int = 0
    last: float = 1.0


class SIDCoSession(EstimateSession):
    """Adapts the number of stages; each rank for itself, because it changes no shape.

    Every five calls, with r = the mean of survivors / target: too few (r < 0.8) adds a stage, too many (r > 1.2)
    removes one, and the direction turns round whenever the last change did not bring r nearer to the band.
    """

    selector: SIDCoThreshold

    def __init__(self, selector: SIDCoThreshold) -> None:
        super().__init__(selector)
        self._known: dict[str, Stages] = {}

    def threshold(self, x: Tensor, magnitude: Tensor, rows: TargetRows) -> Tensor:
        density = rows.target / rows.length
        known = self._known.setdefault(rows.slot.name, Stages(self.selector.stages))
        threshold = self.selector.fit(magnitude, density, known.stages)
        if self.journal is not None:
            before = partial(self._known.__setitem__, rows.slot.name, replace(known))
            self.journal.note_action(before)
        known.ratios += float((magnitude >= threshold).sum()) / rows.target
        known.calls += 1
        if known.calls == ADAPT_EVERY:
            self._adapt(known, math.ceil(math.log2(1 / density)))
        return threshold

    def _adapt(self, known: Stages, most: int) -> None:
        r = known.ratios / known.calls
        known.ratios, known.calls = 0.0, 0
        if abs(r - 1) > TOLERANCE:
            if abs(r - 1) >= abs(known.last - 1) > TOLERANCE:
                known.direction = -known.direction
            known.stages += known.direction if r < 1 else -known.direction
            known.stages = max(1, min(known.stages, max(1, most)))
        known.last = r

    def state_dict(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        fresh = Stages(self.selector.stages)
        return {name: vars(self._known.get(name, fresh)).copy() for name in names}

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        for name, fields in state.items():
            if set(fields) >= set(vars(Stages(1))):
                self._known[name] = Stages(**{key: fields[key] for key in vars(Stages(1))})
