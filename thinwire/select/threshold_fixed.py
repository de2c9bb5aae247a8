"""A threshold given by the user."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from thinwire.errors import UsageError
from thinwire.layout import Slot
from thinwire.select.finish import TargetRows, ThresholdSelector
from thinwire.select.rows import SlotRows, keep_count
from thinwire.validate import check_finite_number


@dataclass(frozen=True)
class FixedThreshold(ThresholdSelector):
    """Everything of magnitude `threshold` or more, but at least one entry and at most density x n.

    The threshold is in the units of the gradients as they arrive: under a GradScaler, of scaled gradients.
    """

    threshold: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_threshold("threshold", self.threshold)

    def rows(self, slot: Slot, mode: Hashable = None) -> SlotRows:
        """`density` bounds the payload; where nothing reaches the threshold the largest entry is sent."""
        keep = keep_count(slot.numel, self.density)
        fewest = 0 if self.finish == "published" else 1
        return TargetRows(slot, (), (), slot.numel, 1, keep, "whole tensor", 1, fewest, keep)

    def estimate(self, x: Tensor, magnitude: Tensor, target: int) -> Tensor:
        return magnitude.new_full((), self.threshold)


def check_threshold(field: str, value: float) -> None:
    check_finite_number(field, value)
    if value <= 0:
        raise UsageError(f"{field} is {value!r}; it must be a number above 0")
