"""The loss scale of a step's gradients: how it is read, and which ones memory can be kept in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from thinwire.errors import UsageError


def no_scale() -> Tensor | None:
    return None


WIDEST_SCALE = 2.0**63
"""Loss scales lie between 1 / this and this, so that every ratio of two is a normal number of float32."""


def usable_scale(scale: Tensor) -> tuple[Tensor, Tensor]:
    """(the scale, or the nearest that memory can be kept in; bool []: it is another one).

    What was multiplied with a scale outside of these bounds could not be told from zero or infinity afterwards.
    """
    low, high = 1 / WIDEST_SCALE, WIDEST_SCALE
    usable = scale.nan_to_num(nan=1.0, posinf=high, neginf=low).clamp(low, high)
    return usable, usable != scale


def scale_reader(grad_scaler: Any) -> Callable[[], Tensor | None]:
    """How to read the current loss scale without waiting for the device."""
    if grad_scaler is None:
        return no_scale
    if not hasattr(grad_scaler, "_get_scale_async") or not hasattr(grad_scaler, "is_enabled"):
        raise UsageError(f"grad_scaler is {grad_scaler!r}; it must be a torch.amp.GradScaler")
    if not grad_scaler.is_enabled():
        return no_scale
    return grad_scaler._get_scale_async
