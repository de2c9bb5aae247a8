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
FRAGMENTS, DELAY = 4, 1
"""Of Streaming DiLoCo here: a quarter of the model at a time, which may take one inner step."""


@dataclass(frozen=True)
class LocalMethod:
    """A preset of local steps with its settings; its repr says all of them."""

    name: str
    every: int

    def __post_init__(self) -> None:
        check_positive_int("every", self.every)
        if self.name == "streaming-diloco" and self.every < FRAGMENTS * (DELAY + 1):
            raise UsageError(
                f"every is {self.every}; with streaming-diloco it must be at least {FRAGMENTS * (DELAY + 1)}"
            )

    def begin(self, model: nn.Module, optimizer: Optimizer) -> tw.LocalSteps:
        """Workers step by themselves from now on, and meet every so many steps."""
        settings: dict[str, Any] = {"every": self.every}
        if self.name == "streaming-diloco":
            settings |= {"fragments": FRAGMENTS, "delay": DELAY}
        return LOCAL_METHODS[self.name](model, optimizer, **settings)

    @property
    def density(self) -> float | None:
        return DENSITIES.get(self.name)
