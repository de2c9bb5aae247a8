"""Kind of data: the shape a model is built for, the loss it learns from, and the metric of its task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from thinwire.recipes.examples import Batch

Carry = Any
"""What a recurrent model hands from one step to the next (tensors, detached), None if it does not."""
Totals = dict[str, tuple[Tensor, Tensor]]
"""Sums of a metric's numerator and denominator, by name; added up over batches and ranks."""


class Kind(ABC):
    """What the loop has to know about a kind of data. Fields of subclasses are the sizes a model is built for."""

    headline: ClassVar[str]
    """The metric that is reported as the score."""
    higher_is_better: ClassVar[bool]

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        """Mean loss of a batch, and what the next step of the same worker starts from."""

    @abstractmethod
    def measure(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Totals, Carry]:
        """What a test batch adds to each metric."""

    def summarise(self, totals: dict[str, tuple[float, float]]) -> dict[str, float]:
        """Metrics from their sums over the whole test set."""
        return {name: numerator / denominator for name, (numerator, denominator) in totals.items()}
