"""VelocityOptimizer: an optimizer for gradients that bring their momentum along."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from thinwire.errors import UsageError


class VelocityOptimizer(Optimizer):
    """Its groups have `momentum` and `nesterov`, which `tw.attach(..., optimizer=this)` reads; nothing else applies them."""

    attached = False
    """Whether a handle has taken momentum over."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.attached:
            raise UsageError(
                "add_param_group was called after attach; its parameters would have no momentum, so close the handle and "
                "attach again"
            )
        super().add_param_group(param_group)

    def attach(self) -> None:
        """A handle applies momentum from now on."""
        self.attached = True

    def detach(self) -> None:
        """The handle is closed, and its momentum gone."""
        self.attached = False

    def begin(self, closure: Any) -> Any:
        """Refuse a step without anybody who applies momentum; the closure's loss."""
        if not self.attached:
            raise UsageError(
                f"{type(self).__name__} leaves momentum to the method; pass it to tw.attach(..., optimizer=opt) with tw.DGC "
                "or another one with memory=tw.memory.MomentumCorrection()"
            )
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()
