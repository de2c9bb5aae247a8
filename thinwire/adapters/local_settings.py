"""LocalSettings: when rounds of local steps begin and end, and what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.adapters.checks import check_bucket_mb
from thinwire.errors import UsageError
from thinwire.plan.policy import Rule
from thinwire.validate import check_finite_number, check_positive_int

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
NESTEROV: Mapping[str, Any] = MappingProxyType({"lr": 0.7, "momentum": 0.9, "nesterov": True})
"""Settings of the outer SGD as DiLoCo publishes them."""


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """When rounds begin and end, and what they do. `LocalSteps` says what each means."""

    every: int
    outer: Mapping[str, Any] | MakeOptimizer = field(default_factory=lambda: NESTEROV)
    fragments: int = 1
    delay: int = 0
    keep_local: float = 0.5
    policy: Sequence[Rule] | None = None
    deterministic: bool = False
    point_device: str | torch.device | None = None
    bucket_mb: float = 25

    def __post_init__(self) -> None:
        check_positive_int("every", self.every)
        check_positive_int("fragments", self.fragments)
        if self.fragments > self.every:
            raise UsageError(
                f"fragments is {self.fragments}; it must be at most every, {self.every}: one begins its round after a step"
            )
        check_finite_number("keep_local", self.keep_local)
        if not 0 <= self.keep_local < 1:
            raise UsageError(f"keep_local is {self.keep_local}; it must be from 0 to below 1")
        check_bucket_mb(self.bucket_mb)
        if not callable(self.outer) and not isinstance(self.outer, Mapping):
            raise UsageError(
                f"outer is of type {type(self.outer).__name__}; it must be settings of torch.optim.SGD, or a function that makes an optimizer"
            )
        shortest, delay = self.every // self.fragments, self.delay
        if isinstance(delay, bool) or not isinstance(delay, int) or not 0 <= delay < shortest:
            raise UsageError(
                f"delay is {delay!r}; it must be from 0 to {shortest - 1}, less than the steps between two rounds: those are "
                f"{shortest} where every is {self.every} and fragments is {self.fragments}"
            )

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mb * 2**20)

    @cached_property
    def starts(self) -> dict[int, int]:
        """By the count of steps modulo `every`: the fragment whose round begins then, at equal distances."""
        count = self.fragments
        return {(index + 1) * self.every // count % self.every: index for index in range(count)}

    def turn_after(self, steps: int) -> int:
        """The fragment whose round begins next after so many inner steps."""
        inside = steps % self.every
        return sum(0 < start <= inside for start in self.starts)

    def make_outer(self, point: Iterable[nn.Parameter]) -> Optimizer:
        """The optimizer that steps these parameters."""
        if callable(self.outer):
            return self.outer(point)
        try:
            return torch.optim.SGD(point, **self.outer)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"outer is {dict(self.outer)}; torch.optim.SGD says: {error}"
            ) from error

    def __str__(self) -> str:
        return (
            f"every {self.every}, fragments {self.fragments}, delay {self.delay}, "
            f"keep_local {self.keep_local}, bucket_mb {float(self.bucket_mb)}"
        )
