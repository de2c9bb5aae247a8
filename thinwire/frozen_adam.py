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

from collections.abc import Callable
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
    dense, as in `tw.Timeline(phases=((0, tw.Dense()), (dense_steps, method)))`: they are AdamW's steps. They are counted as
    the method counts them, by exchanges, so that one that a GradScaler skipped is among them. Where a parameter's v is then
    smaller than `floor` x its mean over the tensor, as for a word that has not come up yet, it is raised to that: nothing
    would limit its updates any more. A tensor that had no gradient at all gets the mean of all others.
    """

    exchanges: Callable[[], int] = staticmethod(lambda: 0)
    """How many steps the handle has begun."""

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
            # Here, because copies, pickles and saved states keep settings and nothing else.
            "dense_steps": dense_steps,
        }
        super().__init__(params, defaults)

    @property
    def dense_steps(self) -> int:
        steps: int = self.defaults["dense_steps"]
        return steps

    @property
    def frozen(self) -> bool:
        """Whether all divisors are fixed."""
        held = [p for group in self.param_groups for p in group["params"]]
        return all("divisor" in self.state.get(parameter, {}) for parameter in held)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        betas = param_group.get("betas", self.defaults["betas"])
        super().add_param_group({**param_group, "momentum": betas[0]})

    def detach(self) -> None:
        super().detach()
        self.exchanges = lambda: 0
        for state in self.state.values():
            if "velocity" in state:
                state["velocity"].zero_()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.begin(closure)
        if self.exchanges() > self.dense_steps:
            self._freeze()
        for group in self.param_groups:
            beta1, lr = group["betas"][0], group["lr"]
            if beta1 != group["momentum"]:
                raise UsageError(
                    f"betas is {group['betas']!r}, but beta1 was taken over as {group['momentum']!r} and must stay that "
                    "(schedulers that cycle momentum do not work with it)"
                )
            used = [p for p in group["params"] if p.grad is not None]
            self._age([p for p in group["params"] if p.grad is None], beta1)
            if not used:
                continue
            divisors = [self._divisor(parameter, group) for parameter in used]
            shares = [
                -lr * (1 - beta1) / (1 - beta1 ** self.state[parameter]["step"])
                for parameter in used
            ]
            if group["weight_decay"] != 0:
                torch._foreach_mul_(used, 1 - lr * group["weight_decay"])
            torch._foreach_addcdiv_(used, [p.grad for p in used], divisors, shares)
        return loss

    def _age(self, unused: list[Tensor], beta1: float) -> None:
        """Momentum goes on where nobody had a gradient."""
        for parameter in unused:
            if "velocity" in self.state.get(parameter, {}):
                self.state[parameter]["velocity"].mul_(beta1)

    def _divisor(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """sqrt(v) + eps of this step."""
        state = self.state[parameter]
        state["step"] = step = state.get("step", 0) + 1
        if "divisor" in state:
            divisor: Tensor = state["divisor"]
            return divisor
        assert parameter.grad is not None
        beta1, beta2 = group["betas"]
        if step == 1:
            state["velocity"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        fresh = parameter.grad - beta1 * state["velocity"]
        state["velocity"].copy_(parameter.grad)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(fresh, fresh, value=1 - beta2)
        return (v / (1 - beta2**step)).sqrt_().add_(group["eps"])

    def _freeze(self) -> None:
        """Fix the divisors of all parameters, those without a gradient so far among them."""
        if self.frozen:
            return
        learned: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "exp_avg_sq" in state:
                    v = state.pop("exp_avg_sq")
                    learned[parameter] = v / (1 - group["betas"][1] ** state["step"])
                    del state["velocity"]
        if not learned:
            raise UsageError(
                f"dense_steps is {self.dense_steps}, but no step was taken in them; make them more"
            )
        total = torch.stack([v.sum(dtype=torch.float32) for v in learned.values()]).sum()
        typical = total / sum(v.numel() for v in learned.values())
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "divisor" in state:
                    continue
                v = learned.get(parameter, torch.zeros_like(parameter))
                mean = v.mean()
                least = torch.where(mean > 0, group["floor"] * mean, typical.to(mean))
                state["divisor"] = v.clamp(min=least).sqrt_().add_(group["eps"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            saved = group.get("dense_steps", self.dense_steps)
            if saved != self.dense_steps:
                raise UsageError(
                    f"dense_steps is {self.dense_steps!r}, but the saved optimizer has {saved!r}; make it with that"
                )
        super().load_state_dict(state_dict)
