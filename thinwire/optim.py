"""Optimizers for methods that own momentum, and how momentum and weight decay are taken over from an optimizer.

The gradient that arrives has momentum in it already. Weight decay must not be compressed, so it stays here, with a
momentum of its own; both sum to what ordinary SGD does:

    d = weight_decay x w;  b = m b + d;  w -= lr x (gradient + (d + m b if nesterov else b))
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from thinwire.errors import UsageError
from thinwire.frozen_adam import FrozenAdam
from thinwire.memory.momentum import check_momentum
from thinwire.methods.base import Dense, DenseMomentum, Method
from thinwire.plan.policy import Rule
from thinwire.validate import check_bool, check_finite_number
from thinwire.velocity import VelocityOptimizer

if TYPE_CHECKING:
    from thinwire.handle import Handle

logger = logging.getLogger(__name__)

TAKEN = "taken_over"
"""The key of a parameter group under which its own settings wait; saved with the optimizer's state."""
DECAY_BUFFER = "decay_buffer"


class DGCSGD(VelocityOptimizer):
    """SGD for `tw.DGC`: the gradient brings its momentum along, weight decay has its own.

    Only together with `tw.attach(..., optimizer=this)`, which reads `momentum` and `nesterov` from here.
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
        check_finite_number("lr", lr)
        check_finite_number("weight_decay", weight_decay)
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


def take_over(
    method: Method, optimizer: Optimizer | None, parameters: Mapping[str, nn.Parameter]
) -> Takeover | None:
    """What has to be taken over for this method, checked but not yet done; None if it owns no momentum."""
    if not method.owns_momentum:
        return None
    name = type(method).__name__
    if optimizer is None:
        raise UsageError(
            f"{name} applies momentum before compression; pass attach(..., optimizer=opt), so that it can be taken over"
        )
    if not isinstance(optimizer, VelocityOptimizer):
        check_sgd(optimizer, name)
    known = {id(parameter) for parameter in parameters.values()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(parameter) not in known and parameter.requires_grad for parameter in held):
        raise UsageError(
            "the optimizer also holds parameters that are not the attached model's; they would lose their momentum, "
            "so give them an optimizer of their own"
        )
    settings = [group.get(TAKEN, group) for group in optimizer.param_groups]
    found = {(float(group["momentum"]), bool(group["nesterov"])) for group in settings}
    if len(found) != 1:
        raise UsageError(
            f"the optimizer's parameter groups have different (momentum, nesterov) {sorted(found)}; {name} needs one"
        )
    momentum, nesterov = found.pop()
    return Takeover(optimizer, dict(parameters), momentum, nesterov)


def check_sgd(optimizer: Optimizer, name: str) -> None:
    """Refuse what cannot be taken over."""
    if type(optimizer) is not SGD:
        raise UsageError(
            f"optimizer is {type(optimizer).__name__}; {name} can take momentum over from torch.optim.SGD, tw.optim.DGCSGD "
            "and, in place of Adam, tw.optim.FrozenAdam"
        )
    for group in optimizer.param_groups:
        for key, allowed in (("dampening", 0), ("maximize", False), ("fused", None)):
            if group.get(key) != allowed and group.get(key):
                raise UsageError(
                    f"{key} is {group[key]!r} in the optimizer; {name} cannot take that over, it must be {allowed!r}"
                )


def check_dense_steps(method: Method, optimizer: FrozenAdam) -> None:
    """Refuse a method that compresses in the steps in which FrozenAdam still learns."""
    begun, count = optimizer.exchanges(), optimizer.dense_steps
    if begun >= count or optimizer.frozen:
        return
    for step in sorted({begun, count - 1, *(t for t in method.turns if begun < t < count)}):
        if not isinstance(method.at(step), Dense):
            raise UsageError(
                f"dense_steps is {count}, but {type(method).__name__} compresses in step {step}; use "
                f"tw.Timeline(phases=((0, tw.Dense()), ({count}, method)))"
            )


@dataclass(eq=False)
class Takeover:
    """Momentum and weight decay of one optimizer, in the hands of one handle."""

    optimizer: Optimizer
    parameters: dict[str, nn.Parameter]
    momentum: float
    nesterov: bool
    _gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)

    def bind(self, method: Method) -> Method:
        """The method with the optimizer's momentum in it; a dense one gets momentum after averaging."""
        if isinstance(self.optimizer, FrozenAdam):
            check_dense_steps(method, self.optimizer)
        if isinstance(method, Dense) and not isinstance(method, DenseMomentum):
            return DenseMomentum(dtype=method.dtype, momentum=self.momentum, nesterov=self.nesterov)
        bound = method.with_momentum(self.momentum, self.nesterov)
        if not bound.owns_momentum:
            raise UsageError(
                f"method is {type(method).__name__}, which applies no momentum, but the handle has taken the optimizer's "
                "over; use memory=tw.MomentumCorrection() or attach anew"
            )
        return bound

    def bind_policy(self, policy: Sequence[Rule]) -> list[Rule]:
        return [
            replace(rule, method=self.bind(rule.method)) if rule.method is not None else rule
            for rule in policy
        ]

    def commit(self, handle: Handle) -> None:
        """Do it: the optimizer stops applying momentum, its buffers become the handle's, decay stays with it."""
        for name, parameter in self.parameters.items():
            buffer = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
            if buffer is not None:
                handle.pipeline.roster.write_memory(name, "momentum", buffer.detach())
        if isinstance(self.optimizer, VelocityOptimizer):
            self.optimizer.attached = True
            handle.on_close(self.optimizer.detach)
            if isinstance(self.optimizer, FrozenAdam):
                self.optimizer.exchanges = lambda: handle.pipeline.step
            return
        for group in self.optimizer.param_groups:
            group.setdefault(
                TAKEN, {key: group[key] for key in ("momentum", "nesterov", "weight_decay")}
            )
            group.update(momentum=0.0, nesterov=False, weight_decay=0.0)
        removers = [
            self.optimizer.register_step_pre_hook(self._add_decay),
            self.optimizer.register_step_post_hook(self._restore_gradients),
        ]
        handle.on_close(lambda: self._give_back(removers))
        logger.info(
            "took momentum %g%s and weight decay %s over from the optimizer, whose own are 0 now; "
            "weight decay is added at step() with its momentum",
            self.momentum,
            " (Nesterov)" if self.nesterov else "",
            sorted({group[TAKEN]["weight_decay"] for group in self.optimizer.param_groups}),
        )

    @torch.no_grad()
    def _add_decay(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(argument is not None for argument in (*args[1:], kwargs.get("closure"))):
            raise UsageError(
                "optimizer.step was called with a closure; momentum was taken over, so call backward first"
            )
        for group in optimizer.param_groups:
            if TAKEN not in group or group["momentum"] != 0:
                raise UsageError(
                    f"momentum is {group['momentum']!r} in the optimizer; it was taken over and must stay 0 (schedulers "
                    "that cycle momentum do not work with it)"
                )
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                decay = decay_direction(parameter, optimizer.state[parameter], group[TAKEN])
                if decay is not None:
                    self._gradients.append((parameter, parameter.grad))
                    parameter.grad = parameter.grad + decay

    def _restore_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Afterwards `p.grad` is again what was exchanged, in its own storage."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients.clear()

    def _give_back(self, removers: Sequence[Any]) -> None:
        for remover in removers:
            remover.remove()
        for group in self.optimizer.param_groups:
            group.update(group.pop(TAKEN, {}))
        for state in self.optimizer.state.values():
            # Ranks hold different momenta, so everybody starts from none; decay starts anew with it.
            state.pop("momentum_buffer", None)
            state.pop(DECAY_BUFFER, None)
        logger.info(
            "gave momentum and weight decay back to the optimizer, whose momentum starts from 0"
        )
