"""A threshold given by the user."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.kernels.looks import Look
from thinwire.layout import Slot, SlotRows, keep_count
from thinwire.select.base import ABOVE_THRESHOLDS, Turn
from thinwire.select.finish import EstimateSession, EstimateTurn, TargetRows, ThresholdSelector
from thinwire.validate import check_finite_number


@dataclass(frozen=True)
class FixedThreshold(ThresholdSelector):
    """Everything of magnitude `threshold` or more, but at least one entry and at most density x n.

    The threshold is in the units of the gradients as they arrive: under a GradScaler, of scaled gradients.
    """

    threshold: float = 0.01
    """The smallest magnitude that is sent."""

    form = ABOVE_THRESHOLDS
    computed_by = (*ThresholdSelector.computed_by, "rows")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_threshold("threshold", self.threshold)

    def rows(self, slot: Slot, mode: Hashable = None) -> SlotRows:
        """`density` bounds the payload; where nothing reaches the threshold the largest entry is sent."""
        keep = keep_count(slot.numel, self.density)
        fewest = 0 if self.finish == "published" else 1
        return TargetRows(slot, (), (), slot.numel, 1, keep, "whole tensor", 1, fewest, keep)

    def estimate(self, look: Look) -> Tensor:
        return torch.full_like(look.targets.lengths, self.threshold)

    def session(self) -> FixedSession:
        return FixedSession(self)


class FixedSession(EstimateSession):
    selector: FixedThreshold

    def turn(self, modes: Hashable) -> Turn:
        return FixedTurn(self)


class FixedTurn(EstimateTurn):
    """Thresholds that never change."""

    def __init__(self, session: FixedSession) -> None:
        super().__init__(session)
        self.first_threshold = session.selector.threshold


def check_threshold(field: str, value: float) -> None:
    check_finite_number(field, value)
    if value <= 0:
        raise UsageError(f"{field} is {value!r}; it must be a number above 0")
