"""DGCSGD: SGD whose momentum is applied before compression.

The gradient that arrives has momentum in it already. Weight decay must not be compressed, so it stays here, with a
momentum of its own; both sum to what ordinary SGD does:

    d = weight_decay x w;  b = m b + d;  w -= lr x (gradient + (d + m b if nesterov else b))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.memory.momentum import check_momentum
from thinwire.optim.velocity import VelocityOptimizer
from thinwire.validate import check_bool, check_finite_number

DECAY_BUFFER = "decay_buffer"


class DGCSGD(VelocityOptimizer):
    """SGD for `tw.DGC`: the gradient brings its momentum along, weight decay has its own.

    Only together with `tw.attach(..., optimizer=this)`, which reads `momentum` and `nesterov` from here.

    Args:
        params: Parameters or groups of them, as for torch.optim.SGD.
        lr: Learning rate.
        momentum: What the method applies on every worker, before compression.
        weight_decay: Factor of the L2 penalty, which is not compressed.
        nesterov: Nesterov's form of the momentum.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        check_momentum("momentum", momentum)
        for field, value in (("lr", lr), ("weight_decay", weight_decay)):
            check_finite_number(field, value)
            if value < 0:
                raise UsageError(f"{field} is {value!r}; it must be a number of at least 0")
        check_bool("nesterov", nesterov)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.begin(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    decay = decay_direction(parameter, self.state[parameter], group)
                    direction = parameter.grad if decay is None else parameter.grad + decay
                    parameter.add_(direction, alpha=-group["lr"])
        return loss


def decay_direction(
    parameter: Tensor, state: dict[str, Any], settings: Mapping[str, Any]
) -> Tensor | None:
    """The weight decay term of this step, with its momentum; None without weight decay."""
    if settings["weight_decay"] == 0:
        return None
    decay = settings["weight_decay"] * parameter
    if settings["momentum"] == 0:
        return decay
    if DECAY_BUFFER not in state:
        state[DECAY_BUFFER] = torch.zeros_like(parameter)
    buffer = state[DECAY_BUFFER].mul_(settings["momentum"]).add_(decay)
    return decay.add_(buffer, alpha=settings["momentum"]) if settings["nesterov"] else buffer
