"""Adam's step of compressed parameters: their gradients have Adam's momentum in them, and the divisor is the handle's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.memory.adam import AdamSettings


def step_of(parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """The optimizer's counter of a parameter's steps, which begins here, where Adam wants it, if it had none."""
    if "step" not in state:
        on_device = group["capturable"] or group["fused"]
        device = parameter.device if on_device else None
        state["step"] = torch.zeros(
            (), dtype=torch.float32 if group["fused"] else None, device=device
        )
    step: Tensor = state["step"]
    return step


def take_step(
    parameters: Sequence[Tensor],
    moments: Sequence[Tensor],
    optimizer: Optimizer,
    group: dict[str, Any],
    adam: AdamSettings,
) -> None:
    """w = w - lr x weight_decay x w - lr / (1 - beta1^t) x q / (sqrt(v) + eps)."""
    lr, decay, weights = group["lr"], group["weight_decay"], list(parameters)
    signed = -lr if group["maximize"] else lr
    divisors = list(torch._foreach_sqrt(list(moments)))
    torch._foreach_add_(divisors, adam.eps)
    if decay and isinstance(lr, float):
        torch._foreach_mul_(weights, 1 - lr * decay)
    elif decay:
        for weight in weights:
            weight.mul_(1 - lr * decay)
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    updates = list(torch._foreach_div(gradients, divisors))
    rates = []
    for weight in weights:
        step = step_of(weight, optimizer.state[weight], group)
        step += 1
        # A counter on the CPU is read; one on a device is not waited for.
        count = float(step) if step.device.type == "cpu" else step
        rates.append(signed / (1 - adam.beta1**count))
    if all(isinstance(rate, float) for rate in rates):
        torch._foreach_mul_(updates, rates)
    else:
        for update, rate in zip(updates, rates, strict=True):
            update.mul_(rate)
    torch._foreach_sub_(weights, updates)
