"""MomentumTakeover: how momentum and weight decay move from SGD to a method that owns momentum, and back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.errors import UsageError
from thinwire.layout import local_part
from thinwire.methods.base import DenseMomentum, Method
from thinwire.optim.base import Takeover, refuse_cycled_momentum, refuse_foreign_parameters
from thinwire.optim.dgc_sgd import DECAY_BUFFER, decay_direction
from thinwire.optim.loaded import LoadedState
from thinwire.optim.velocity import VelocityOptimizer
from thinwire.plan.policy import Rule

if TYPE_CHECKING:
    from thinwire.handle import Handle

logger = logging.getLogger(__name__)

TAKEN = "taken_over"
"""The key of a parameter group under which its own settings wait. Saved states have them in their own places."""
SETTINGS = ("momentum", "nesterov", "weight_decay")
BUFFER = "momentum_buffer"
DECAY = "decay"
"""The store of a handle's state that holds the momentum of weight decay."""


def check_sgd(optimizer: Optimizer, name: str) -> None:
    """Refuse settings that cannot be taken over."""
    for group in optimizer.param_groups:
        for key, allowed in (("dampening", 0), ("maximize", False), ("fused", None)):
            if group.get(key) != allowed and group.get(key):
                raise UsageError(
                    f"{key} is {group[key]!r} in the optimizer; {name} cannot take that over, it must be {allowed!r}"
                )


@dataclass(eq=False)
class MomentumTakeover(Takeover):
    """Momentum and weight decay of one optimizer, in the hands of one handle."""

    optimizer: Optimizer
    parameters: dict[str, nn.Parameter]
    momentum: float
    nesterov: bool
    handles: Sequence[Handle] = ()
    _gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    _decay: dict[nn.Parameter, dict[str, Tensor]] = field(default_factory=dict)
    """The momentum of every parameter's weight decay; the same on all ranks."""
    _loaded: LoadedState = field(default_factory=LoadedState)
    _removers: list[Any] = field(default_factory=list)
    """Take the hooks off the optimizer; empty when nothing is taken over."""

    can_give_back = True
    refuse_settings = staticmethod(check_sgd)

    @classmethod
    def check(
        cls, method: Method, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
    ) -> MomentumTakeover:
        """Refuse what cannot be taken over."""
        name = type(method).__name__
        cls.refuse_settings(optimizer, name)
        refuse_foreign_parameters(optimizer, parameters, "momentum")
        refuse_cycled_momentum(optimizer)
        settings = [group.get(TAKEN, group) for group in optimizer.param_groups]
        found = {(float(group["momentum"]), bool(group["nesterov"])) for group in settings}
        if len(found) != 1:
            raise UsageError(
                f"the optimizer's parameter groups have different (momentum, nesterov) {sorted(found)}; {name} needs one"
            )
        momentum, nesterov = found.pop()
        return cls(optimizer, dict(parameters), momentum, nesterov)

    def bind(self, method: Method) -> Method:
        """The method with the optimizer's momentum in it; a dense one gets momentum after averaging."""
        if method.is_dense and not method.owns_momentum:
            return method.beside(DenseMomentum(momentum=self.momentum, nesterov=self.nesterov))
        bound = method.with_momentum(self.momentum, self.nesterov)
        if not bound.owns_momentum:
            raise UsageError(
                f"method is {type(method).__name__}, which applies no momentum, but the handle has taken the optimizer's "
                "over; use memory=tw.memory.MomentumCorrection() or attach anew"
            )
        return bound

    def bind_policy(self, policy: Sequence[Rule]) -> list[Rule]:
        return [
            replace(rule, method=self.bind(rule.method)) if rule.method is not None else rule
            for rule in policy
        ]

    def commit(self, handles: Sequence[Handle]) -> None:
        """Do it: the optimizer stops applying momentum, its buffers become the handles', decay stays with it.

        There are several handles where workers in one process share the optimizer; the first gives everything back.
        """
        self.handles = handles
        self._adopt_buffers(anew=True)
        self._take_hold(handles[0])

    def _take_hold(self, handle: Handle) -> None:
        self._take_settings()
        removers = [
            *self._loaded.follow(self.optimizer),
            self.optimizer.register_step_pre_hook(self._begin_step),
            self.optimizer.register_step_post_hook(self._restore_gradients),
            self.optimizer.register_state_dict_post_hook(self._save_plain),
            self.optimizer.register_load_state_dict_pre_hook(self._check_loaded),
            self.optimizer.register_load_state_dict_post_hook(self._take_loaded),
        ]
        self._removers = removers
        handle.on_close(self.drop)
        logger.info(
            "took momentum %g%s and weight decay %s over from the optimizer, whose own are 0 now; "
            "weight decay is added at step() with its momentum",
            self.momentum,
            " (Nesterov)" if self.nesterov else "",
            sorted({group[TAKEN]["weight_decay"] for group in self.optimizer.param_groups}),
        )

    def _take_settings(self) -> None:
        for group in self.optimizer.param_groups:
            group.setdefault(TAKEN, {key: group[key] for key in SETTINGS})
            group.update(momentum=0.0, nesterov=False, weight_decay=0.0)

    def _adopt_buffers(self, *, anew: bool = False) -> None:
        """Momentum that the optimizer has gathered becomes the handles', unless they have gathered some already."""
        for name, parameter in self.parameters.items():
            # An entry for everyone: an optimizer without state is stepped by distributed checkpoints, to make it some.
            buffer = self.optimizer.state[parameter].pop(BUFFER, None)
            for handle in self.handles if buffer is not None else ():
                if anew or handle.reducer.step == 0:
                    held = local_part(buffer.detach())
                    handle.reducer.assignments.write_memory(name, "momentum", held)

    def _begin_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Add weight decay now, or behind a closure that computes the gradients; the arguments if they change."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._add_decay(optimizer)
            return None

        def decayed_closure() -> Any:
            loss = closure()
            self._add_decay(optimizer)
            return loss

        return args[:1], {"closure": decayed_closure}

    @torch.no_grad()
    def _add_decay(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            if TAKEN not in group:
                raise UsageError(
                    "a parameter group was added to the optimizer after its momentum was taken over; switch(tw.Dense()), take a "
                    "step, close() the handle and attach again with the new group"
                )
            if group["momentum"] != 0:
                raise UsageError(
                    f"momentum is {group['momentum']!r} in the optimizer; it was taken over and must stay 0 (schedulers "
                    "that cycle momentum do not work with it)"
                )
            if group["weight_decay"] != 0:
                raise UsageError(
                    f"weight_decay is {group['weight_decay']!r} in the optimizer; it was taken over and must stay 0 (change "
                    f"that of group[{TAKEN!r}] instead)"
                )
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                decay = decay_direction(
                    parameter, self._decay.setdefault(parameter, {}), group[TAKEN]
                )
                if decay is not None:
                    self._gradients.append((parameter, parameter.grad))
                    parameter.grad = parameter.grad + decay

    def _restore_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Afterwards `p.grad` is again what was exchanged, in its own storage."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients.clear()

    # -- saving and loading ------------------------------------------------------------------------------------

    def stores(self) -> dict[str, dict[str, Tensor]]:
        """What a handle saves for this: the momentum of weight decay by parameter name, zeros where there is none yet."""
        decayed = any(
            group.get(TAKEN, {}).get("weight_decay") for group in self.optimizer.param_groups
        )
        if not decayed or self.momentum == 0:
            return {}
        held = {name: local_part(self._decay_of(p)) for name, p in self.parameters.items()}
        return {DECAY: {name: values.clone() for name, values in held.items()}}

    def after_load(self, handle: Handle, memory: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.load_shared_state(memory.get(DECAY, {}))

    def load_shared_state(self, state: Mapping[str, Tensor]) -> None:
        self._decay = {}
        for name, parameter in self.parameters.items():
            if name in state:
                held = torch.zeros_like(parameter)
                local_part(held).copy_(state[name])
                self._decay[parameter] = {DECAY_BUFFER: held}

    def shared_state(self) -> dict[str, Tensor]:
        """The same, as what is repaired with the parameters."""
        return self.stores().get(DECAY, {})

    def _decay_of(self, parameter: nn.Parameter) -> Tensor:
        held = self._decay.get(parameter, {}).get(DECAY_BUFFER)
        return torch.zeros_like(parameter) if held is None else held

    def _save_plain(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """A saved optimizer is one that owns its momentum: any script can load it and trains as before.

        Its buffers have what is the same on all ranks: the momentum of weight decay and of dense parameters. That of
        compressed parameters differs between ranks; it is in the handle's state, and 0 here.
        """
        names = {parameter: name for name, parameter in self.parameters.items()}
        reducer = self.handles[0].reducer
        reducer.settle()
        state = dict(state_dict["state"])
        for packed, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
            packed.update(packed.pop(TAKEN, {}))
            for index, parameter in zip(packed["params"], group["params"], strict=True):
                if parameter not in names or not self.momentum:
                    continue
                buffer = self._decay_of(parameter).clone()
                if reducer.assignments.by_name[names[parameter]].compressor.travels_whole:
                    held = reducer.assignments.held(names[parameter], "momentum")
                    local_part(buffer).add_(0 if held is None else held)
                state[index] = {**state.get(index, {}), BUFFER: buffer}
        state_dict["state"] = state

    def _check_loaded(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Before anything is replaced."""
        for saved in state_dict["param_groups"]:
            settings = saved.get(TAKEN, saved)
            for key, own in (("momentum", self.momentum), ("nesterov", self.nesterov)):
                if settings.get(key) != own:
                    raise UsageError(
                        f"{key} is {settings.get(key)!r} in the saved optimizer, but {own!r} was taken over; load it before "
                        "attach, or make the optimizer with that"
                    )

    def _take_loaded(self, optimizer: Optimizer) -> None:
        self._take_settings()
        self._adopt_buffers()

    @torch.no_grad()
    def give_back(self) -> None:
        """Let the optimizer apply momentum again, and go on from what has been gathered.

        All parameters must be dense by now: their momentum is then the same on all ranks.
        """
        assignments = self.handles[0].reducer.assignments
        for name, parameter in self.parameters.items():
            held = assignments.held(name, "momentum")
            if self.momentum and held is not None:
                total = self._decay_of(parameter).clone()
                local_part(total).add_(held)
                self.optimizer.state[parameter][BUFFER] = total
        self._let_go()
        logger.info("gave momentum and weight decay back to the optimizer, which goes on from them")

    def step_back(self) -> None:
        self._let_go()
        self._loaded.put_back(self.optimizer)

    def drop(self) -> None:
        """The same without what has been gathered: ranks hold different momenta, so everybody starts from none."""
        if self._removers:
            self._let_go()
            logger.info(
                "gave momentum and weight decay back to the optimizer, whose momentum starts from 0"
            )

    def _let_go(self) -> None:
        for remover in self._removers:
            remover.remove()
        self._removers = []
        for group in self.optimizer.param_groups:
            group.update(group.pop(TAKEN, {}))
        self._decay.clear()


class VelocityTakeover(MomentumTakeover):
    """The same for an optimizer that was made for it, and that cannot go on by itself."""

    optimizer: VelocityOptimizer
    can_give_back = False

    @staticmethod
    def refuse_settings(optimizer: Optimizer, name: str) -> None:
        """It has none that could not be taken over."""

    def _take_hold(self, handle: Handle) -> None:
        self.optimizer.attach()
        handle.on_close(self.optimizer.detach)
