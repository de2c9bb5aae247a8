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

from thinwire.kernels.looks import Look, Tail, TorchLook
from thinwire.layout import RowTable
from thinwire.select.base import ABOVE_ESTIMATES
from thinwire.select.finish import EstimateSession, ThresholdSelector
from thinwire.validate import check_bool, check_choice, check_positive_int

DISTRIBUTIONS = ("exponential", "gamma", "pareto")
FIRST_RATIO = 0.25
ADAPT_EVERY = 5
TOLERANCE = 0.2
LOG_FLOOR = 2.2e-16
"""Added before a logarithm is taken, as in the published code."""
RESOLUTION = 2.0**-40
"""Of sums in float64, relative to them. A smaller difference depends on the order in which they were added up."""
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

    form = ABOVE_ESTIMATES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("distribution", self.distribution, DISTRIBUTIONS)
        check_positive_int("stages", self.stages)
        check_bool("adapt", self.adapt)

    def session(self) -> EstimateSession:
        return SIDCoSession(self) if self.adapt else EstimateSession(self)

    @property
    def torch_only(self) -> str:  # type: ignore[override]
        """Logarithms of all magnitudes, and counts that are read back."""
        if self.distribution == "gamma":
            return 'distribution="gamma"'
        return "adapt=True" if self.adapt else super().torch_only

    def estimate(self, look: Look) -> Tensor:
        return self.fit(look, [self.stages] * len(look.targets.pairs))

    def fit(self, look: Look, stages: Sequence[int]) -> Tensor:
        """The threshold of each slot after so many `stages`, float64 [slots]."""
        targets = look.targets
        # Stages behind the first of slots that want less than its ratio.
        more = [
            one - 1 if wanted / length < FIRST_RATIO else 0
            for one, (length, wanted) in zip(stages, targets.pairs, strict=True)
        ]
        ratios = [
            ratios_of(wanted / length, one)
            for one, (length, wanted) in zip(more, targets.pairs, strict=True)
        ]
        first = targets.listed("first", [one for one, _ in ratios])
        further = targets.listed("further", [one for _, one in ratios])
        threshold = self._first(look, first)
        for stage in range(max(more)):
            tail = look.tail(threshold)
            mean = tail.total / tail.count
            excess = mean - tail.smallest
            variance = variance_of(tail, mean, tail.count - 1)
            if self.distribution == "exponential":
                step = -excess * further.log()
            else:
                step = pareto_quantile(excess, variance, further)
            # With nothing above it, or all of it equal, there is nothing to fit.
            usable = (tail.count > 1) & (excess > RESOLUTION * mean) & step.isfinite()
            if min(more) <= stage:
                usable = usable & targets.listed(
                    ("has stage", stage), [stage < one for one in more]
                )
            threshold = torch.where(usable, tail.smallest + step, threshold)
        return threshold

    def _first(self, look: Look, ratio: Tensor) -> Tensor:
        everything, n = look.tail(), look.targets.lengths
        mean = everything.total / n
        match self.distribution:
            case "exponential":
                return -mean * ratio.log()
            case "pareto":
                variance = variance_of(everything, mean, (n - 1).clamp(min=1))
                return pareto_quantile(mean, variance, ratio)
            case _:
                assert isinstance(look, TorchLook)
                return gamma_quantiles(look, mean, ratio)


def ratios_of(density: float, further: int) -> tuple[float, float]:
    """(of the first stage, of each of the `further` ones)."""
    return (FIRST_RATIO, (density / FIRST_RATIO) ** (1 / further)) if further else (density, 1.0)


def variance_of(tail: Tail, mean: Tensor, others: Tensor) -> Tensor:
    """Around `mean`, by the number of `others` than one; no less than sums can tell from 0, even if all magnitudes are equal."""
    return torch.maximum((tail.squares - mean * tail.total) / others, RESOLUTION * mean * mean)


def pareto_quantile(mean: Tensor, variance: Tensor, ratio: Tensor) -> Tensor:
    """The value exceeded with probability `ratio` under the generalised Pareto law with these moments.

    Near shape 0 the law is exponential, and the closed form 0 / 0.
    """
    q = mean * mean / variance
    scale = mean * (q + 1) / 2
    shape = (q - 1) / 2
    flat = shape.abs() < 1e-4
    safe = torch.where(flat, 1.0, shape)
    return scale * torch.where(flat, -ratio.log(), (1 - ratio**safe) / safe)


def gamma_quantiles(look: TorchLook, mean: Tensor, ratio: Tensor) -> Tensor:
    """The values exceeded with probability `ratio` under the gamma law, shape by Minka's closed estimate."""
    shape = torch.stack([gamma_shape(sizes) for sizes in look.magnitudes]).double()
    low = torch.zeros_like(shape)
    # Chernoff: no gamma quantile at `ratio` lies beyond this.
    high = 2 * (shape - 2 * ratio.log() + 1)
    for _ in range(QUANTILE_STEPS):
        middle = (low + high) / 2
        too_low = torch.special.gammaincc(shape, middle) > ratio
        low = torch.where(too_low, middle, low)
        high = torch.where(too_low, high, middle)
    return mean / shape * high


def gamma_shape(magnitude: Tensor) -> Tensor:
    # Of the gradient at length 1, so that what keeps the logarithm of an exact zero finite is small beside it. Any smaller
    # number would let the zeros of a ReLU decide the fit.
    length = magnitude.norm().clamp(min=torch.finfo(magnitude.dtype).tiny)
    s = (magnitude.mean() / length + LOG_FLOOR).log() - (
        magnitude / length + LOG_FLOOR
    ).log().mean()
    return (3 - s + ((s - 3) ** 2 + 24 * s).sqrt()) / (12 * s)


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

    def thresholds(self, look: TorchLook, table: RowTable) -> Tensor:
        names = [rows.slot.name for rows in table.rows]
        known = [self._known.setdefault(name, Stages(self.selector.stages)) for name in names]
        thresholds = self.selector.fit(look, [one.stages for one in known])
        if self.journal is not None:
            for name, one in zip(names, known, strict=True):
                self.journal.note_action(partial(self._known.__setitem__, name, replace(one)))
        rounded = thresholds.to(look.pieces[0].dtype)
        # Down by a bit, since those count that reach it.
        limits = torch.nextafter(rounded, torch.full_like(rounded, -torch.inf))
        for one, (length, wanted), count in zip(
            known, look.targets.pairs, look.count(limits).tolist(), strict=True
        ):
            one.ratios += count / wanted
            one.calls += 1
            if one.calls == ADAPT_EVERY:
                self._adapt(one, math.ceil(math.log2(length / wanted)))
        return thresholds

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
