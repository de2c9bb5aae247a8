"""FrozenAdam: Adam whose second moment is learned in dense steps and then kept, so that momentum can come before compression.

Adam divides by the size of recent gradients. Of a compressed one most entries are 0 and the rest come late and large, so that it
divides by something else than the gradient's size, and its momentum begins when an entry arrives. With a fixed divisor
the update is linear in the gradients again: whatever is held back moves the weights later by as much as it would have at once, and
momentum may be accumulated by every worker before it selects (`tw.MomentumCorrection`), as in SGD. The divisor in 1-bit
Adam is kept in the same way: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
Speed" (ICML 2021).

    u = beta1 u + g on every worker, what is sent of the u accumulated so far arrives as d
    dense steps:  g = d - beta1 d';  v = beta2 v + (1 - beta2) g^2          (d' is the d of the step before)
    later:        v stays
    all:          w = w - lr x weight_decay x w - lr x (1 - beta1) / (1 - beta1^t) x d / (sqrt(v / (1 - beta2^t)) + eps)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.memory.momentum import check_momentum
from thinwire.validate import check_finite_number, check_positive_int, check_positive_number
from thinwire.velocity import VelocityOptimizer


class FrozenAdam(VelocityOptimizer):
    """AdamW for methods with `memory=tw.MomentumCorrection(masking=False)`.

    Only together with `tw.attach(..., optimizer=this)`, which reads beta1 from here. The first `dense_steps` must be
    dense, as in `tw.Timeline(phases=((0, tw.Dense()), (dense_steps, method)))`: they are AdamW's steps. Where a
    parameter's v is then smaller than `floor` x its mean over the tensor, as for a word that has not come up yet, it is
    raised to that: nothing would limit its updates any more.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        dense_steps: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        floor: float = 0.01,
    ) -> None:
        check_finite_number("lr", lr)
        check_positive_int("dense_steps", dense_steps)
        for beta in betas:
            check_momentum("betas", beta)
        check_finite_number("eps", eps)
        check_finite_number("weight_decay", weight_decay)
        check_positive_number("floor", floor)
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "floor": floor,
            "momentum": betas[0],
            "nesterov": False,
        }
        self.dense_steps = dense_steps
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.begin(closure)
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            divisors = [self._divisor(parameter, group) for parameter in used]
            beta1, lr = group["betas"][0], group["lr"]
            shares = [
                -lr * (1 - beta1) / (1 - beta1 ** self.state[parameter]["step"])
                for parameter in used
            ]
            if group["weight_decay"] != 0:
                torch._foreach_mul_(used, 1 - lr * group["weight_decay"])
            torch._foreach_addcdiv_(used, [p.grad for p in used], divisors, shares)
        return loss

    def _divisor(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """sqrt(v) + eps of this step."""
        state = self.state[parameter]
        state["step"] = step = state.get("step", 0) + 1
        if step > self.dense_steps:
            return state["divisor"]
        assert parameter.grad is not None
        beta1, beta2 = group["betas"]
        if step == 1:
            state["velocity"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        fresh = parameter.grad - beta1 * state["velocity"]
        state["velocity"].copy_(parameter.grad)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(fresh, fresh, value=1 - beta2)
        corrected = v / (1 - beta2**step)
        if step == self.dense_steps:
            # From the next step on; this one is AdamW's.
            least = group["floor"] * corrected.mean()
            state["divisor"] = corrected.clamp(min=least).sqrt_().add_(group["eps"])
            del state["velocity"], state["exp_avg_sq"]
        return corrected.sqrt_().add_(group["eps"])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "dense_steps": self.dense_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict.get("dense_steps", self.dense_steps)
        if saved != self.dense_steps:
            raise UsageError(
                f"dense_steps is {self.dense_steps!r}, but the saved optimizer has {saved!r}; make it with that"
            )
        super().load_state_dict(state_dict)
