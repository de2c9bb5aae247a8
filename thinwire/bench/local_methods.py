"""Local steps in the step benchmark: presets by name, each with the number of inner steps between two rounds.

They change the optimisation, which every other row of the benchmark leaves as it is; verdicts name them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.validate import check_positive_int

LOCAL_METHODS: dict[str, Callable[..., tw.LocalSteps]] = {
    "diloco": tw.DiLoCo,
    "streaming-diloco": tw.StreamingDiLoCo,
    "sparseloco": tw.SparseLoCo,
}
DENSITIES = {"sparseloco": 1 / 64}
"""Of those that have one, as published: a density that was asked for is for methods that exchange in every step."""
FRAGMENTS, MOST_DELAY = 4, 5
"""Of Streaming DiLoCo: a quarter of the model at a time, which may take so many inner steps, or as many as there are."""


@dataclass(frozen=True)
class LocalMethod:
    """A preset of local steps with its settings; its repr says all of them."""

    name: str
    every: int

    def __post_init__(self) -> None:
        check_positive_int("every", self.every)
        if self.name == "streaming-diloco" and self.every < 2 * FRAGMENTS:
            raise UsageError(
                f"every is {self.every}; with streaming-diloco it must be at least {2 * FRAGMENTS}"
            )

    def begin(self, model: nn.Module, optimizer: Optimizer) -> tw.LocalSteps:
        """Workers step by themselves from now on, and meet every so many steps."""
        settings: dict[str, Any] = {"every": self.every}
        if self.name == "streaming-diloco":
            delay = min(MOST_DELAY, self.every // FRAGMENTS - 1)
            settings |= {"fragments": FRAGMENTS, "delay": delay}
        return LOCAL_METHODS[self.name](model, optimizer, **settings)

    @property
    def density(self) -> float | None:
        return DENSITIES.get(self.name)
